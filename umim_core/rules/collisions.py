"""How many rules a merge module without positions cannot tell apart.

Its surrogate is a softmax-weighted mean over a span's tokens, so it depends on the tokens' relative
frequencies alone. Repeated to 12 tokens, the least common multiple of 2, 3 and 4, and sorted, rules
of one surrogate are equal::

    (a, b)        aaaaaabbbbbb      one surrogate
    (b, a)        aaaaaabbbbbb
    (a, a, b, b)  aaaaaabbbbbb
    (a, a, b)     aaaaaaaabbbb      another
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from umim_core.rules.counting import ORDERS
from umim_core.rules.ruleset import RuleSet

_REPEATED: Final = math.lcm(*ORDERS)


def collision_rate(rules: RuleSet) -> float:
    """Return the share of rules that have the surrogate of another rule, whatever the weights.

    Args:
        rules: Rules of a module with ``positions="none"``; learned positions do not collide so.

    Returns:
        0 .. 1; 0 without rules.
    """
    if not len(rules):
        return 0.0
    keys = np.concatenate(
        [np.sort(np.repeat(rules.ids_by_order[n], _REPEATED // n, axis=1)) for n in ORDERS]
    )
    _, counts = np.unique(keys, axis=0, return_counts=True)
    return float(counts[counts > 1].sum() / len(rules))
