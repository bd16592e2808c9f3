"""Span eviction: of a rule's span, the KV cache drops all columns but the last once it is old.

Every token is read raw, by the backbone alone. The last token of a span has seen the others, so
what they say is still in the cache when their columns are gone; the columns that stay keep their
positions. No module takes part, and no forward is added. A span [s, e] gives up its columns
s .. e - 1 as soon as, t being the last token that was read,

    t - e >= W      the span is W tokens old, and
    t - s >= 3      no rule of up to 4 tokens can change it any more (of longer ones, the longest
                    less one): it is certain, whatever follows. The spans of a prompt are certain at
                    its end, which no rule crosses.

With the ids a b c d e f g, the rules (b, c) and (d, e, f), and W = 1::

    query           a  b  c  d  e  f  g
    column of b        x  x  x  x            (b, c) is certain when e was read
    columns of d, e          x  x  x  x      (d, e, f) is one token old when g was read
    column of c           x  x  x  x  x      the last of its span stays

The first token of a text keeps its column whatever the rules say: where nothing else is of interest
a model attends to it (an attention sink), and without it later states lose their scale. Source:
Xiao et al., Efficient Streaming Language Models with Attention Sinks (2024).

A query is computed before its own token can age a span: with W = 0 the last token of a span still
sees all of it, and the next one is the first that does not.

Shapes: B rows, T raw tokens, S units.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from umim_core.errors import ConfigError, require
from umim_core.merging.packing import Segmentation
from umim_core.rules.grams import LONGEST
from umim_core.text.token_ids import Ints

SINKS: Final = 1  # first tokens of a text whose columns always stay
_NEVER: Final = np.iinfo(np.int64).max


def last_queries(cut: Segmentation, age: int, certain: int = LONGEST - 1) -> Ints:
    """Return the last token that sees the column of each token of a text [T] (int64).

    It is the largest integer for columns that always stay. ``cut`` has the units' starts and
    lengths [S]; W = ``age`` tokens are read behind a span before it gives up its columns, and
    ``certain`` behind a unit's first token until the unit is certain.

    A worked example, W = 0: units (a), (b, c) of 3 tokens give [never, 4, never]; as a prompt,
    whose units are certain at its end (``certain=0``), [never, 2, never]. Token 0 always stays.
    """
    starts, lengths = cut
    ends = starts + lengths - 1
    last = np.repeat(np.maximum(ends + age, starts + certain), lengths)
    last[ends] = _NEVER
    last[:SINKS] = _NEVER
    return last


def check_age(age: object) -> None:
    """Refuse an age of spans that is none."""
    fits = isinstance(age, int) and not isinstance(age, bool) and age >= 0
    rule = "the age at which spans are evicted must be an integer of at least 0"
    remedy = "Give the number of tokens behind a span, 16 for example."
    require(fits, ConfigError, rule, age, remedy)
