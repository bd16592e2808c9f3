from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umim_core.merging.packing import PackedUnits, pack_rows
from umim_core.training.loss import aligned_rows


def pack(*rows: list[int]) -> PackedUnits:
    """Pack rows given by the lengths of their units; the ids count up."""
    ids = [np.arange(1, sum(lengths) + 1) for lengths in rows]
    cuts = []
    for lengths in rows:
        array = np.array(lengths, dtype=np.int64)
        cuts.append((np.cumsum(array) - array, array))
    return pack_rows(ids, cuts)


def masks(packed: PackedUnits) -> tuple[list[list[int]], list[list[int]]]:
    """The paper's masks of teacher [B, T] and student [B, S]."""
    rows = aligned_rows(packed)
    teacher = np.zeros((len(packed.lengths), int(packed.raw_counts.max())), dtype=int)
    student = np.zeros(tuple(packed.lengths.shape), dtype=int)
    teacher[rows.batch, rows.teacher] = 1
    student[rows.batch, rows.student] = 1
    return teacher.tolist(), student.tolist()


def pairs(packed: PackedUnits) -> list[tuple[int, int, int]]:
    rows = aligned_rows(packed)
    assert len(rows) == len(rows.batch)
    return list(zip(rows.batch.tolist(), rows.teacher.tolist(), rows.student.tolist(), strict=True))


def test_the_example_of_the_paper() -> None:
    packed = pack([1, 2, 1, 2])  # x1 | x2 x3 | x4 | x5 x6
    assert masks(packed) == ([[0, 0, 1, 1, 0, 1]], [[0, 1, 1, 1]])
    # (x3, z23), (x4, x4), (x6, z56), counted from 0
    assert pairs(packed) == [(0, 2, 1), (0, 3, 2), (0, 5, 3)]


def algorithm(
    rows: list[list[int]],
) -> tuple[list[list[int]], list[list[int]], list[tuple[int, int, int]]]:
    """Algorithm "Aligned Predictive Distillation" of the paper, line by line, with padding."""
    width = max(sum(lengths) for lengths in rows)
    packed_width = max(len(lengths) for lengths in rows)
    masks_t, masks_s, packs = [], [], []
    for b, lengths in enumerate(rows):
        keep: list[int] = []  # n - 1 inactive placeholders, then the surrogate
        first_merge = None
        for n in lengths:
            if n > 1 and first_merge is None:
                first_merge = len(keep)
            keep += [0] * (n - 1) + [1]
        keep += [0] * (width - len(keep))
        attention = [1] * len(lengths) + [0] * (packed_width - len(lengths))
        start = width if first_merge is None else first_merge
        mask_t = [m if j >= start else 0 for j, m in enumerate(keep)]
        drop = sum(attention) - sum(mask_t)
        mask_s = list(attention)
        for j in range(packed_width):
            if attention[j] and drop:
                mask_s[j] = 0
                drop -= 1
        rows_t = [j for j, m in enumerate(mask_t) if m]
        rows_s = [j for j, m in enumerate(mask_s) if m]
        assert len(rows_t) == len(rows_s)
        masks_t.append(mask_t)
        masks_s.append(mask_s)
        packs += [(b, t, s) for t, s in zip(rows_t, rows_s, strict=True)]
    return masks_t, masks_s, packs


UNITS = st.lists(st.sampled_from([1, 1, 1, 2, 3, 4]), min_size=1, max_size=12)


@given(st.lists(UNITS, min_size=1, max_size=5))
def test_random_spans_and_padding_give_the_masks_of_the_algorithm(rows: list[list[int]]) -> None:
    packed = pack(*rows)
    masks_t, masks_s, packs = algorithm(rows)
    assert masks(packed) == (masks_t, masks_s)
    assert pairs(packed) == packs


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        pytest.param([1, 1, 1], [], id="no-span"),
        pytest.param([4], [(0, 3, 0)], id="one-span-is-the-row"),
        pytest.param([2, 3, 4], [(0, 1, 0), (0, 4, 1), (0, 8, 2)], id="all-spans"),
        pytest.param([3, 1, 1], [(0, 2, 0), (0, 3, 1), (0, 4, 2)], id="span-first"),
        pytest.param([1, 1, 2], [(0, 3, 2)], id="span-last"),
        pytest.param([1], [], id="one-token"),
    ],
)
def test_rows_at_the_borders(units: list[int], expected: list[tuple[int, int, int]]) -> None:
    assert pairs(pack(units)) == expected
