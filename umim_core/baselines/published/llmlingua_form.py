"""LLMLingua's choice of tokens as package ``llmlingua`` 0.2.2 makes it, from one context.

It differs from the paper's (``llmlingua.py``) in what stays: a token by the loss of the one behind
it; of a segment the losses above a quantile of the losses of all that is left, not of the
segment's; and a tail that is shorter than a segment stays whole. A text of fewer than half a
segment stays whole, too. So it keeps another number of tokens than was asked for.

Written anew; ``tests/baselines/llmlingua_choices.json`` has choices of the package.

Shapes: T tokens, S tokens that are read at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from umim_core.baselines.methods import Ints


class Prefix(Protocol):
    """Kept tokens, and losses of tokens that are read after them."""

    def score(self, segment: Ints) -> NDArray[np.float64]:
        """Return the loss of each token of a segment [S]."""
        ...

    def append(self, ids: Ints) -> None:
        """Add kept tokens."""
        ...


def published_choice(
    ids: Ints,
    protected: NDArray[np.bool_],
    budget: int,
    segment: int,
    whole: NDArray[np.float64],
    prefix: Prefix,
) -> Ints:
    """Return the indices of the tokens that stay, rising; about ``budget`` of them.

    Args:
        ids: The text [T].
        protected: Tokens that stay [T] (bool).
        budget: Tokens that are asked for.
        segment: Tokens of a segment.
        whole: Loss of each token in the whole text [T].
        prefix: Scores after kept tokens; none at first.
    """
    left, losses = np.arange(len(ids)), whole[1:].copy()
    share = budget / (len(ids) + 3)  # its count of a context's tokens, and one
    end = min(segment, len(ids))
    start = end - segment
    for number, size in enumerate(_sizes(len(ids), segment)):
        if end > len(left):
            break
        if number:
            losses[start : end - 1] = prefix.score(ids[left[start:end]])[1:]
            prefix.append(ids[left[start : end - segment]])
            start = end - segment
        stop = start + size
        keep = np.append(losses > _quantile(losses, share), True)
        keep[stop:] = True
        keep[:start] = True
        keep |= protected[left]
        end = stop - int((~keep[:stop]).sum()) + segment
        left, losses = left[keep], losses[keep[:-1]]
    return left


def _quantile(losses: NDArray[np.float64], share: float) -> float:
    """Return the loss that a share of all losses is above of, less one of them."""
    place = max(0, min(len(losses) - 1, int(len(losses) * share) - 1))
    return float(np.sort(losses)[::-1][place])


def _sizes(tokens: int, segment: int) -> Iterator[int]:
    """Yield the sizes of segments: the first has one less, the last what is left."""
    rest = tokens + 3 - segment
    if rest < 0:
        yield tokens + 2
        return
    yield segment - 1
    if rest > segment:
        yield from repeat(segment, rest // segment)
        rest %= segment
    if rest:
        yield rest
