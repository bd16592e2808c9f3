"""Layouts of states worked out by hand; their scores are in ``evaluation/test_perplexity.py``."""

from __future__ import annotations

import numpy as np
import torch

from umim_core.merging.decode_states import BranchLayout, branch_layout
from umim_core.merging.packing import pack_rows
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet


def layout_of(ids: list[int], *spans: tuple[int, ...]) -> BranchLayout:
    matcher, row = Matcher(RuleSet.from_spans(spans)), np.array(ids)
    return branch_layout(pack_rows([row], [matcher.segment(row)]), matcher, "compact")


def test_layout_of_the_worked_example_with_a_rule_inside_another() -> None:
    layout = layout_of([0, 1, 2, 3, 4], (1, 2), (1, 2, 3, 4))
    assert layout.trunk.tolist() == [[True, False, False, False, True]]
    assert layout.lengths.tolist() == [[1, 1, 2, 1, 4]]
    assert layout.positions.tolist() == [[0, 1, 1, 2, 1]]
    assert layout.span_ids.tolist() == [[1, 2, 0, 0], [1, 2, 3, 4]]
    assert layout.surrogate.tolist() == [[-1, -1, 0, -1, 1]]
    assert (layout.mask(torch.float32)[0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [1, 0, 0, 0, 1],
    ]


def test_no_column_depends_on_a_later_token() -> None:
    rng = np.random.default_rng(0)
    spans = {tuple(rng.integers(0, 4, rng.integers(2, 5)).tolist()) for _ in range(40)}
    row = rng.integers(0, 4, 40).tolist()
    spans |= {tuple(row[at : at + n]) for at, n in ((3, 9), (15, 5), (20, 7))}
    whole = layout_of(row, *spans)
    for size in range(1, len(row)):
        part = layout_of(row[:size], *spans)
        assert part.positions[0].tolist() == whole.positions[0, :size].tolist()
        assert part.lengths[0].tolist() == whole.lengths[0, :size].tolist()
        assert torch.equal(part.mask(torch.float64), whole.mask(torch.float64)[..., :size, :size])


def test_rows_are_padded_on_the_right_and_padding_sees_the_trunk_only() -> None:
    matcher = Matcher(RuleSet.from_spans([(1, 2), (1, 2, 3)]))
    rows = [np.array([1, 2, 3, 0]), np.array([1, 2]), np.array([], dtype=np.int64)]
    layout = branch_layout(
        pack_rows(rows, [matcher.segment(row) for row in rows]), matcher, "compact"
    )
    assert layout.lengths.tolist() == [[1, 2, 3, 1], [1, 2, 0, 0], [0, 0, 0, 0]]
    assert layout.positions.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert (layout.mask(torch.float32)[1, 0, 2:] == 0).tolist() == [
        [False, True, True, False],
        [False, True, True, True],
    ]
