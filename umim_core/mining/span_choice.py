"""Choice of spans by the tokens that they save of a text, together with the others."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.text.token_ids import MAX_TOKEN_ID, Ints

_ROUNDS: Final = 12  # five sufficed on general English, whatever K was
_THREADS: Final = 2


def choose_spans(rules: RuleSet, ids: NDArray[np.integer], offsets: Ints, count: int) -> RuleSet:
    """Keep the ``count`` spans that together save the most tokens of a text, or all that save any.

    No span crosses a border [num_segments + 1] of its segments, flat ids [T].
    """
    rules = rules.with_prices(None)
    sizes = rules.sizes
    chosen = _highest(rules.support * (sizes - 1), count)
    best, most = chosen, -1
    for _ in range(_ROUNDS):
        merged = rules.take(chosen)
        saved = saved_tokens(merged, ids, offsets)
        if int(saved.sum()) <= most:
            break
        most, best = int(saved.sum()), chosen.copy()
        best[chosen] = saved > 0
        value = np.zeros(len(rules), dtype=np.int64)
        rest = _raw_rest(merged, ids, offsets)
        for n in rules.orders:  # apart, or the longer ones would hide the shorter
            value[sizes == n] = saved_tokens(rules.take(sizes == n), rest, offsets)
        value[chosen] = saved
        again = _highest(value, count)
        if np.array_equal(again, chosen):
            break
        chosen = again
    return rules.take(best)


def saved_tokens(rules: RuleSet, ids: NDArray[np.integer], offsets: Ints) -> Ints:
    """Return how many tokens of a text each rule saves [R] (int64)."""
    starts, lengths, _ = Matcher(rules).segment_many(ids, offsets, threads=_THREADS)
    saved = np.zeros(len(rules), dtype=np.int64)
    for n in rules.orders:
        at = starts[lengths == n]
        if len(at):
            spans = np.asarray(ids)[at[:, None] + np.arange(n)]
            saved += (n - 1) * np.bincount(rules.places(spans), minlength=len(rules))
    return saved


def _raw_rest(rules: RuleSet, ids: NDArray[np.integer], offsets: Ints) -> NDArray[np.int32]:
    """Return a text in which every merged token is an id that no candidate holds."""
    starts, lengths, _ = Matcher(rules).segment_many(ids, offsets, threads=_THREADS)
    rest = np.array(ids, dtype=np.int32)
    for offset in range(rules.longest):
        rest[starts[(lengths > 1) & (lengths > offset)] + offset] = MAX_TOKEN_ID
    return rest


def _highest(value: Ints, count: int) -> NDArray[np.bool_]:
    """Return which candidates have the highest values [R] (bool), of equal ones the first."""
    chosen = np.zeros(len(value), dtype=np.bool_)
    chosen[np.argsort(-value, kind="stable")[:count]] = True
    return chosen
