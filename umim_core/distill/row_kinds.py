"""Kinds of training rows: a row of text, as a model will meet it with merged units in front.

    merged   [merged text]                          loss from the first merge on (the paper's)
    prompt   [merged start][raw rest]               loss on the rest: reading behind a merged prompt
    copy     [merged half][the same half, raw]      loss on the repetition, where the teacher copies
                                                    almost surely: what a unit forgot is the loss

A row keeps its kind for good: it is drawn from its index.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from umim_core.distill.token_rows import TokenRows
from umim_core.merging.packing import Segmentation
from umim_core.rules.matcher import Matcher
from umim_core.rules.prefix_matching import segment_prefix

RowKind = Literal["merged", "prompt", "copy"]
_STREAM: Final = 0x6B696E64  # keeps these draws apart from those of the data order
_LEAST: Final = 16  # tokens of a row that is cut in two


class TrainingRow(NamedTuple):
    """A row of a batch.

    Attributes:
        ids: Raw ids [T].
        cut: Their units.
        loss_from: Raw position before which units have no loss, besides those before the first
            merge.
    """

    ids: NDArray[np.integer]
    cut: Segmentation
    loss_from: int


def training_row(
    rows: TokenRows,
    index: int,
    matcher: Matcher,
    *,
    prompt: float = 0.0,
    copy: float = 0.0,
) -> TrainingRow:
    """Return a row of the kind that its index draws."""
    ids = rows.row(index)
    if prompt + copy > 0.0 and rows.merge_until[index] == len(ids) >= _LEAST:
        draw = np.random.default_rng([_STREAM, index])
        share, size = draw.random(), len(ids)
        if share < copy:
            half = ids[: size // 2]
            twice = np.concatenate([half, half])
            return TrainingRow(twice, segment_prefix(matcher.segment, twice, len(half)), len(half))
        if share < copy + prompt:
            start = int(draw.integers(size // 4, size - size // 4))
            return TrainingRow(ids, segment_prefix(matcher.segment, ids, start), start)
    return TrainingRow(ids, rows.segment(index, matcher), 0)
