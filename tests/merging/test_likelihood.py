"""Rows that cannot be scored, and layouts by hand; scores: ``evaluation/test_perplexity.py``."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from umim_core import UMIM
from umim_core.backbone.backbone import Backbone
from umim_core.config.form import Merge
from umim_core.errors import EvaluationError, NumericalError
from umim_core.evaluation.scoring import Request, Scorer
from umim_core.merging.decode_states import BranchLayout, branch_layout
from umim_core.merging.likelihood import score_rows
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.packing import pack_rows
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

FINE = np.array([1, 2, 3])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (np.array([1, 32, 2]), "ids must lie between 0 and 31; got row 1: 32. Encode"),
        (np.array([True, False]), "got row 1: shape .*, bool"),
        (np.array([]), "at least one token; got .3, 0."),
    ],
)
def test_a_row_that_is_not_ids_is_refused(
    tiny_backbone: Backbone, row: NDArray[np.integer], message: str
) -> None:
    with pytest.raises(EvaluationError, match=message):
        score_rows([FINE, row], MergedModel.without_merging(tiny_backbone))


@pytest.fixture(scope="module")
def broken(tiny_checkpoint: Path) -> UMIM:
    """A model whose merge module gives no numbers."""
    umim = UMIM.from_pretrained(tiny_checkpoint, dtype="float32")
    umim.module.norm_o.weight.fill_(math.nan)
    return umim


def harness_score(umim: UMIM, scope: Merge) -> object:
    scorer = Scorer(MergedModel(umim.backbone, umim.module, umim.matcher), 32, scope)
    return scorer.score([Request(np.array([1, 2]), np.array([3]))], 1)


@pytest.mark.parametrize(
    "measure",
    [
        lambda umim: umim.perplexity("w1 w2 w3"),
        lambda umim: umim.score(["w1 w2"], [["w3"]]),
        lambda umim: harness_score(umim, "prompt"),
        lambda umim: harness_score(umim, "all"),
    ],
)
def test_scores_that_are_no_numbers_are_refused(
    broken: UMIM, measure: Callable[[UMIM], object]
) -> None:
    with pytest.raises(NumericalError, match="log-probability must be finite; got nan"):
        measure(broken)


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
