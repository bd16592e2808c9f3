"""Kinds of training rows: cuts, where the loss begins, shares, and that a row keeps its kind."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from pydantic import ValidationError

from umim_core.config.recipe import DistillConfig
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.training.objectives import TrainingRow, training_row
from umim_core.training.token_rows import TokenRows

MATCHER = Matcher(RuleSet.from_spans([(1, 2), (3, 4, 5)]))
IDS = np.array([1, 2, 3, 4, 5, 6] * 6 + [7])


def row_at(index: int, *, merge_until: int = len(IDS), **shares: float) -> TrainingRow:
    """A row of a split whose rows are all alike."""
    rows = TokenRows.of_rows([IDS.tolist()] * (index + 1), [merge_until] * (index + 1))
    return training_row(rows, index, MATCHER, **shares)


def kind_of(row: TrainingRow) -> str:
    half = len(IDS) // 2
    if row.loss_from == half and (row.cut[1][row.cut[0] < half] > 1).any():
        return "copy" if np.array_equal(row.ids[:half], row.ids[half:]) else "prompt"
    return "prompt" if row.loss_from else "merged"


def test_rows_are_merged_unless_other_kinds_are_asked_for() -> None:
    for index in range(50):
        row = row_at(index)
        assert kind_of(row) == "merged"
        assert row.cut[1].tolist() == [2, 3, 1] * 6 + [1]


def test_shares_are_those_asked_for_and_a_row_keeps_its_kind() -> None:
    rows = [row_at(i, prompt=0.3, copy=0.2) for i in range(500)]
    kinds = Counter(map(kind_of, rows))
    assert abs(kinds["prompt"] - 150) < 45 and abs(kinds["copy"] - 100) < 45
    again = [row_at(i, prompt=0.3, copy=0.2) for i in range(100)]
    assert [kind_of(row) for row in again] == [kind_of(row) for row in rows[:100]]


def test_a_copy_repeats_its_merged_half_raw_and_has_its_loss_there() -> None:
    row = row_at(0, copy=0.999)
    half = len(IDS) // 2
    assert row.ids.tolist() == IDS[:half].tolist() * 2
    assert row.cut[1].tolist() == [2, 3, 1] * 3 + [1] * half
    assert row.loss_from == half


def test_a_prompt_row_is_raw_behind_its_merged_start() -> None:
    row = row_at(3, prompt=0.999)
    starts, lengths = row.cut
    assert len(IDS) // 4 <= row.loss_from < 3 * len(IDS) // 4 + 1
    assert (lengths[starts >= row.loss_from] == 1).all()
    assert (lengths[starts < row.loss_from] > 1).any()


def test_shares_above_one_are_refused() -> None:
    with pytest.raises(ValidationError, match="add up to 1 at most"):
        DistillConfig(max_steps=1, prompt_rows=0.6, copy_rows=0.6)
