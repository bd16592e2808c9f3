"""What cannot be scored, and layouts by hand; scores: ``evaluation/test_perplexity.py``."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from support.merged_models import placed, random_merged_model
from support.tiny_models import random_backbone
from umim_core import UMIM
from umim_core.backbone.backbone import Backbone
from umim_core.config.form import Merge
from umim_core.errors import EvaluationError, GenerationError, NumericalError
from umim_core.evaluation.scoring import Request, Scorer
from umim_core.merging.continuations import score_continuations
from umim_core.merging.decode_states import branch_layout
from umim_core.merging.likelihood import score_rows
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
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


def test_a_row_of_two_tokens_has_one_score_and_of_one_none(tiny_backbone: Backbone) -> None:
    scores = score_rows([FINE[:2], FINE[:1]], MergedModel.without_merging(tiny_backbone))
    assert [len(part.log_probs) for part in scores] == [1, 0]


@pytest.mark.parametrize(
    ("context", "endings"), [([], [FINE]), (FINE, []), (FINE, [FINE, np.array([])])]
)
def test_empty_parts_are_refused(
    tiny_backbone: Backbone, context: np.ndarray, endings: list[np.ndarray]
) -> None:
    with pytest.raises(EvaluationError, match="at least one token"):
        score_continuations([context], [endings], MergedModel.without_merging(tiny_backbone))


def test_preserved_positions_fill_the_backbone_sooner() -> None:
    small = random_backbone(max_position_embeddings=6)
    model = MergedModel(small, MergeModule(16), Matcher(RuleSet.from_spans([(2, 3, 4)])))
    row = [np.arange(1, 6)], [[np.arange(6, 9)]]
    assert score_continuations(*row, model)
    with pytest.raises(EvaluationError, match="6 positions; got 7 positions for 5 units"):
        score_continuations(*row, placed(model, "preserved"))


def test_below_the_merge_depth_raw_tokens_count_against_the_window() -> None:
    short = random_backbone("mistral", sliding_window=16)
    model = random_merged_model(short, Matcher(RuleSet.from_spans([(1, 2, 3, 4)])), depth=1, rank=0)
    context, endings = np.array([*[1, 2, 3, 4] * 9, 5, 6]), [FINE[:2], FINE[2:]]  # 11 units
    # Each in a row of its own, whatever stands beside it: the backbone's own windows count.
    contexts = [context, context[-3:]]
    for row, scored in zip(
        contexts, score_continuations(contexts, [endings, endings], model), strict=True
    ):
        for ending, scores in zip(endings, scored, strict=True):
            alone = score_continuations([row], [[ending]], model)[0][0]
            assert torch.allclose(scores.log_probs, alone.log_probs, atol=1e-5)
    preserved = random_merged_model(short, Matcher(RuleSet.from_spans([(7, 8)])), depth=0, rank=0)
    with pytest.raises(GenerationError, match=r"window \(16\); got 39 units"):
        score_continuations([context], [endings[:1]], preserved)


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


def test_layout_of_the_worked_example_with_a_rule_inside_another() -> None:
    matcher = Matcher(RuleSet.from_spans([(1, 2), (1, 2, 3, 4)]))
    rows = [np.arange(5), np.array([0, 1, 2])]
    layout = branch_layout(pack_rows(rows, list(map(matcher.segment, rows))), matcher, "compact")
    assert layout.trunk.tolist() == [[True, False, False, False, True], [True, False, *[True] * 3]]
    assert layout.lengths.tolist() == [[1, 1, 2, 1, 4], [1, 1, 2, 0, 0]]  # 0 for padding
    assert layout.positions.tolist() == [[0, 1, 1, 2, 1], [0, 1, 1, 1, 1]]
    assert layout.span_ids.tolist() == [[1, 2, 0, 0], [1, 2, 3, 4]]
    assert layout.surrogate.tolist() == [[-1, -1, 0, -1, 1], [-1, -1, 0, -1, -1]]
    assert (layout.mask(torch.float32)[0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [1, 0, 0, 0, 1],
    ]
