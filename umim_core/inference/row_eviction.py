"""Span eviction while generating: the KV cache drops all columns of a rule's span but the last.

Every token is read raw, by the backbone alone. The last token of a span has seen the others, so
what they say is still in the cache when their columns are gone; the columns that stay keep their
positions. No module takes part, and no forward is added. A span [s, e] gives up its columns
s .. e - 1 as soon as, t being the last token that was read,

    t - e >= W      the span is W tokens old, and
    t - s >= 3      no rule of up to 4 tokens can change it any more (of longer ones, the longest
                    less one): it is certain, whatever follows.

A prompt is read whole before anything goes, and its spans are certain at its end; no span crosses
the border to the generated tokens, as in merging. With the prompt a b c d, the rule (b, c), W = 1
and the generated tokens x y::

    columns   a b c d     read whole; (b, c) is one token old
              a c d       after the prefill
              a c d x     positions 0 2 3 4
              a c d x y

The first token of a text keeps its column whatever the rules say: where nothing else is of interest
a model attends to it (an attention sink), and without it later states lose their scale. Source:
Xiao et al., Efficient Streaming Language Models with Attention Sinks (2024).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from umim_core.rules.matcher import Matcher
from umim_core.text.token_ids import Ints

SINKS: Final = 1  # first tokens of a text whose columns always stay


class RowEviction:
    """The columns that B rows hold, and the spans that will give theirs up at an age in tokens.

    The next forward reads the raw ids of the prompts [B][T_b].
    """

    def __init__(self, matcher: Matcher, age: int, prompts: Sequence[Sequence[int]]) -> None:
        self._age = age
        self._certain = matcher.rules.longest - 1  # tokens behind a unit's first that may change it
        self._suffixes = matcher.suffixes(len(prompts))
        self._read = [len(ids) for ids in prompts]
        self._held = [list(range(len(ids))) for ids in prompts]  # positions, column by column
        self._young: list[deque[tuple[int, int]]] = [deque() for _ in prompts]  # not yet certain
        # The last token that a span waits for, and the positions it gives up then; in order.
        self._waiting: list[deque[tuple[int, range]]] = [deque() for _ in prompts]
        for row, ids in enumerate(prompts):
            for start, length in zip(*matcher.segment(np.array(ids)), strict=True):
                self._wait(row, int(start), int(length), certain=0)

    def push(self, tokens: Ints, running: NDArray[np.bool_]) -> None:
        """Follow the tokens that the next forward reads; as ``SuffixMatcher.advance``."""
        step = self._suffixes.advance(tokens, running)
        for row in np.flatnonzero(running).tolist():
            units, token = self._young[row], self._read[row]
            for _ in range(int(step.rollback[row])):
                units.pop()
            length = int(step.lengths[row])
            units.append((token - length + 1, length))
            while units and token - units[0][0] >= self._certain:
                self._wait(row, *units.popleft(), certain=self._certain)
            self._held[row].append(token)
            self._read[row] += 1

    def _wait(self, row: int, start: int, length: int, certain: int) -> None:
        """Let a certain span wait for its age."""
        if length > 1:
            end = start + length - 1
            self._waiting[row].append(
                (max(end + self._age, start + certain), range(max(start, SINKS), end))
            )

    def take_old(self) -> list[list[int]]:
        """Return the columns of each row that are old once a forward is done, and forget them."""
        gone: list[list[int]] = []
        for held, waiting, read in zip(self._held, self._waiting, self._read, strict=True):
            columns: list[int] = []
            while waiting and waiting[0][0] < read:
                columns += (bisect_left(held, position) for position in waiting.popleft()[1])
            for column in reversed(columns):
                del held[column]
            gone.append(columns)
        return gone
