"""Plain truncation: the end of a text stays, its beginning is cut off.

The end is what stands next to the tokens that are predicted, and what inference servers keep of a
prompt that is too long. With T = 6, a protected first token and a budget of 3::

    ids   <s> a b c d e        kept  0 4 5        <s> d e
"""

from __future__ import annotations

import numpy as np

from umim_core.baselines.methods import Text, TokenReducer
from umim_core.text.token_ids import Ints


class Truncation(TokenReducer):
    """Keep the last tokens, and those that are protected."""

    def keep(self, text: Text, budget: int) -> Ints:
        free = np.flatnonzero(~text.protected)
        dropped = free[: len(text.ids) - budget]
        return np.setdiff1d(np.arange(len(text.ids)), dropped)
