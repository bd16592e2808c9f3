"""Rules by confidence: spans whose every token the language model predicts with confidence.

A run is a maximal stretch of tokens, inside a segment, each of which has more than
``min_probability`` given all raw tokens before it in the segment. Runs of 2 to 4 tokens are rules,
counted as often as they occur; a single token or a longer run gives none, and no part of a longer
run counts.

Example (``min_probability`` 0.5)::

    ids    4    7    8    9    7    8    4
    p      -   .6   .9   .2   .7   .8   .1      runs (7 8) and (7 8)     (7, 8): 2

Source: paper, "Alternative Merge-Rule Construction".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from umim_core.backbone.backbone import Backbone
from umim_core.errors import CorpusError, NumericalError, require
from umim_core.merging.likelihood import token_log_probs
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.grams import ORDERS
from umim_core.text.token_ids import AnyInts, Ids, Ints, Offsets, check_offsets, read_ids

SpanCounts = tuple[dict[int, Ids], dict[int, Ints]]


def confidence_counts(
    backbone: Backbone,
    ids: AnyInts,
    offsets: Offsets,
    *,
    min_probability: float,
    batch_size: int = 8,
    excluded: Iterable[int] = (),
) -> SpanCounts:
    """Count the runs of 2, 3 and 4 confident tokens of ids, flat [T].

    Segments, with borders [num_segments + 1], may be ragged; ``batch_size`` of them share a
    forward. Every token of a run exceeds ``min_probability``; ``excluded`` ids, as the tokenizer's
    special ones always, end a run and are in none. Returns the spans [R_n, n] per order, rows
    ascending, and how many runs they are [R_n].
    """
    check_offsets(offsets, len(ids))
    dropped = np.array(sorted({*excluded, *backbone.special_ids}), dtype=np.int64)
    parts: list[SpanCounts] = []
    for first in range(0, len(offsets) - 1, batch_size):
        borders = np.asarray(offsets[first : first + batch_size + 1])
        tokens = read_ids(ids, int(borders[0]), int(borders[-1]))
        rule = f"ids must lie in 0..{backbone.vocab_size - 1}, the backbone's vocabulary"
        most = int(tokens.max(initial=0))
        remedy = "Tokenize the corpus with its own tokenizer."
        require(most < backbone.vocab_size, CorpusError, rule, most, remedy)
        sure = _log_probs(backbone, tokens, borders - borders[0]) > math.log(min_probability)
        sure &= ~np.isin(tokens, dropped)
        # The first token of a segment is never sure, so no run crosses a border.
        edges = np.flatnonzero(np.diff(sure.astype(np.int8), prepend=0, append=0))
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        runs = {n: tokens[starts[lengths == n, None] + np.arange(n)] for n in ORDERS}
        parts.append((runs, {n: np.ones(len(runs[n]), np.int64) for n in ORDERS}))
    return add_span_counts(parts)


def add_span_counts(parts: Sequence[SpanCounts]) -> SpanCounts:
    """Add the runs of several pieces of a corpus; a piece holds whole segments."""
    spans, support = {}, {}
    for n in ORDERS:
        rows = np.concatenate([np.zeros((0, n), np.int32), *(part[0][n] for part in parts)])
        each = np.concatenate([np.zeros(0, np.int64), *(part[1][n] for part in parts)])
        spans[n], places = np.unique(rows, axis=0, return_inverse=True)
        support[n] = np.zeros(len(spans[n]), dtype=np.int64)
        np.add.at(support[n], places.reshape(-1), each)
    return spans, support


def _log_probs(backbone: Backbone, tokens: Ids, borders: Ints) -> NDArray[np.float64]:
    """Return log p of each token [T] given those before it in its segment; -inf for the first."""
    out = np.full(tokens.size, -np.inf)
    pieces = [(a, b) for a, b in pairwise(borders.tolist()) if b - a > 1]
    if not pieces:
        return out
    scores = token_log_probs(
        [tokens[a:b] for a, b in pieces], MergedModel.without_merging(backbone)
    )
    for (a, b), score in zip(pieces, scores, strict=True):
        out[a + 1 : b] = score.numpy()
    rule, remedy = "every log-probability must be a number", "Load the backbone in float32."
    require(not np.isnan(out).any(), NumericalError, rule, "NaN", remedy)
    return out
