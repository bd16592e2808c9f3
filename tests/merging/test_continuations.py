"""Packed continuations: what each column may see, and equality with one forward each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.merged_models import placed, random_merged_model
from support.tiny_models import random_backbone
from umim_core.backbone.backbone import Backbone
from umim_core.config.form import UnitPositions
from umim_core.errors import EvaluationError, GenerationError
from umim_core.merging.continuations import score_continuations
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return random_backbone("llama", torch.float64, vocab_size=23)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_preserved_positions_fill_the_backbone_sooner() -> None:
    small = random_backbone(vocab_size=23, max_position_embeddings=6)
    module, matcher = MergeModule(16), Matcher(RuleSet.from_spans([(2, 3, 4)]))
    context, endings = ids(1, 2, 3, 4, 5), [ids(6, 7, 8)]
    assert score_continuations([context], [endings], MergedModel(small, module, matcher))
    with pytest.raises(EvaluationError, match="6 positions; got 7 positions for 5 units"):
        score_continuations(
            [context], [endings], placed(MergedModel(small, module, matcher), "preserved")
        )


@pytest.mark.parametrize(
    ("context", "endings"), [(ids(), [ids(1)]), (ids(1), []), (ids(1), [ids(1), ids()])]
)
def test_empty_parts_are_refused(
    backbone: Backbone, context: np.ndarray, endings: list[np.ndarray]
) -> None:
    with pytest.raises(EvaluationError, match="at least one token"):
        score_continuations([context], [endings], MergedModel.without_merging(backbone))


@pytest.mark.parametrize("positions", ["compact", "preserved"])
def test_one_continuation_per_row_makes_no_mask_of_columns(
    backbone: Backbone, positions: UnitPositions, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = Matcher(RuleSet.from_spans([(1, 2), (4, 5, 6)]))
    module = MergeModule(16).double()
    contexts, endings = (
        [ids(1, 2, 3, 4, 5, 6, 7), ids(8), ids(9, 1, 2)],
        [ids(3, 1), ids(2), ids(5, 6, 7, 8)],
    )
    model = placed(MergedModel(backbone, module, rules), positions)
    with torch.no_grad():
        masked = score_continuations(contexts, [[e, ids(1)] for e in endings], model)
        monkeypatch.delattr("umim_core.merging.continuations.block_mask")
        alone = score_continuations(contexts, [[e] for e in endings], model)
    for [score], [expected, _] in zip(alone, masked, strict=True):
        assert torch.allclose(score.log_probs, expected.log_probs, rtol=0, atol=1e-6)
        assert torch.equal(score.greedy, expected.greedy)


def test_below_the_merge_depth_raw_tokens_count_against_the_window() -> None:
    short = random_backbone("mistral", torch.float64, vocab_size=23, sliding_window=16)
    model = random_merged_model(short, Matcher(RuleSet.from_spans([(1, 2, 3, 4)])), depth=1, rank=0)
    context, endings = ids(*[1, 2, 3, 4] * 9, 5, 6), [ids(7, 8), ids(9)]  # 11 units
    assert score_continuations([context], [endings[:1]], model)  # the backbone's own windows
    with pytest.raises(GenerationError, match=r"window \(16\); got 39 units"):
        score_continuations([context], [endings], model)
