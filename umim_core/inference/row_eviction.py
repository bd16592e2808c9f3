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

from umim_core.rules.matcher import Matcher

SINKS: Final = 1  # first tokens of a text whose columns always stay


class RowEviction:
    """The columns that a row holds, and the spans that will give theirs up at an age in tokens.

    The next forward reads the raw ids of the prompt [T].
    """

    def __init__(self, matcher: Matcher, age: int, prompt: Sequence[int]) -> None:
        self._age = age
        self._certain = matcher.rules.longest - 1  # tokens behind a unit's first that may change it
        self._suffixes = matcher.suffixes(1)
        self._read = len(prompt)
        self._held = list(range(len(prompt)))  # positions, column by column
        self._young = deque[tuple[int, int]]()  # units that are not yet certain
        # The last token that a span waits for, and the positions it gives up then; in order.
        self._waiting = deque[tuple[int, range]]()
        for start, length in zip(*matcher.segment(np.array(prompt)), strict=True):
            self._wait(int(start), int(length), certain=0)

    def push(self, token: int) -> None:
        """Follow the token that the next forward reads."""
        step = self._suffixes.advance(np.array([token]), np.array([True]))
        for _ in range(int(step.rollback[0])):
            self._young.pop()
        length = int(step.lengths[0])
        self._young.append((self._read - length + 1, length))
        while self._young and self._read - self._young[0][0] >= self._certain:
            self._wait(*self._young.popleft(), certain=self._certain)
        self._held.append(self._read)
        self._read += 1

    def _wait(self, start: int, length: int, certain: int) -> None:
        """Let a certain span wait for its age."""
        if length > 1:
            end = start + length - 1
            last = max(end + self._age, start + certain)
            self._waiting.append((last, range(max(start, SINKS), end)))

    def take_old(self) -> list[int]:
        """Return the columns that are old once a forward is done, and forget them."""
        columns = list[int]()
        while self._waiting and self._waiting[0][0] < self._read:
            positions = self._waiting.popleft()[1]
            columns += (bisect_left(self._held, position) for position in positions)
        for column in reversed(columns):
            del self._held[column]
        return columns
