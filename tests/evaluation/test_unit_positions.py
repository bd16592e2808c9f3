"""Evaluation with preserved unit positions: against the paper's listing and against hand counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from support.engine_matrix import log_probs_from_scratch, module_for
from support.tiny_models import random_backbone
from umim_core.backbone.backbone import Backbone
from umim_core.config.form import Merge
from umim_core.errors import EvaluationError
from umim_core.evaluation.alignment import evaluate_alignment
from umim_core.evaluation.perplexity import perplexity
from umim_core.evaluation.scoring import Request, Scorer
from umim_core.merging.likelihood import token_log_probs
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

Ids = NDArray[np.int64]
VOCAB, LIMIT = 11, 32
FAMILIES = ("llama", "mistral", "gpt2")
NO_RULES = Matcher(RuleSet.from_spans([]))


def build(name: str) -> Backbone:
    return random_backbone(name, torch.float64, vocab_size=VOCAB, max_position_embeddings=LIMIT)


def random_rules() -> Matcher:
    rng = np.random.default_rng(0)
    spans = {tuple(rng.integers(0, VOCAB, rng.integers(2, 5)).tolist()) for _ in range(50)}
    return Matcher(RuleSet.from_spans(spans | {(0, 1, 2, 3)}))


def random_rows() -> list[Ids]:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, VOCAB, length) for length in (LIMIT, 1, 2, 17)]
    return [*rows, np.array([0, 1, 2, 3, *rng.integers(0, VOCAB, 9)]), np.array([0, 1, 2, 3])]


def listing(ids: Ids, matcher: Matcher, module: MergeModule, backbone: Backbone) -> Tensor:
    """One forward per target, over the units of what stands before it, at raw positions."""
    return log_probs_from_scratch(backbone, module, matcher, ids, "preserved")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_target_equals_the_listing(name: str) -> None:
    backbone = build(name)
    module, matcher, rows = module_for(backbone), random_rules(), random_rows()
    assert any(matcher.segment(row)[1].max() == 4 for row in rows)
    found = token_log_probs(rows, MergedModel(backbone, module, matcher, "preserved"))
    wrong = token_log_probs(rows, MergedModel(backbone, module, matcher, "compact"))
    for row, ours, other in zip(rows, found, wrong, strict=True):
        theirs = listing(row, matcher, module, backbone)
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-10)
        if len(row) == LIMIT:
            assert float((other - theirs).abs().max()) > 1e-4


def test_without_merges_everything_equals_the_base_model() -> None:
    backbone = build("gpt2")
    rows = random_rows()[:1]
    ours = perplexity(rows, MergedModel(backbone, module_for(backbone), NO_RULES, "preserved"))
    assert ours == perplexity(rows, MergedModel.without_merging(backbone))


def test_perplexity_and_alignment_are_those_of_the_policy() -> None:
    backbone = build("llama")
    rows, module, matcher = random_rows()[:1], module_for(backbone), random_rules()
    total = float(listing(rows[0], matcher, module, backbone).sum())
    found = perplexity(rows, MergedModel(backbone, module, matcher, "preserved"))
    assert found.nll_sum == pytest.approx(-total, abs=1e-9)
    compact, preserved = (
        evaluate_alignment(rows, MergedModel(backbone, module, matcher, policy)).means["kl"]
        for policy in ("compact", "preserved")
    )
    assert abs(compact - preserved) > 1e-5


def test_a_row_needs_as_many_positions_as_it_has_raw_inputs() -> None:
    backbone = build("gpt2")
    module, matcher = module_for(backbone), Matcher(RuleSet.from_spans([(1, 1, 1, 1)]))
    row = [np.ones(LIMIT + 2, dtype=np.int64)]
    assert (
        len(token_log_probs(row, MergedModel(backbone, module, matcher, "compact"))[0]) == LIMIT + 1
    )
    with pytest.raises(EvaluationError, match=f"{LIMIT} positions; got {LIMIT + 1} positions"):
        token_log_probs(row, MergedModel(backbone, module, matcher, "preserved"))


def scorer(scope: Merge, name: str = "gpt2") -> Scorer:
    backbone = build(name)
    matcher = Matcher(RuleSet.from_spans([(1, 2), (3, 4, 5), (6, 7, 8, 9)]))
    return Scorer(MergedModel(backbone, module_for(backbone), matcher, "preserved"), scope, LIMIT)


def test_a_continuation_is_scored_from_the_raw_length_of_its_context() -> None:
    model = scorer("prompt")
    context, continuation = [6, 7, 8, 9, 0, 1, 2, 10], [3, 10, 0]
    whole = np.array(context + continuation)
    cut = Matcher(RuleSet.from_spans([(6, 7, 8, 9), (0, 1, 2)]))
    model.merged_model = replace(model.merged_model, matcher=cut)
    module, backbone = model.merged_model.module, model.merged_model.backbone
    wanted = listing(whole, cut, module, backbone)[-len(continuation) :].sum()  # type: ignore[arg-type]
    request = Request(np.array(context), np.array(continuation))
    [found] = model.score([request], 1)
    assert found.log_prob == pytest.approx(float(wanted), abs=1e-9)
    model.merged_model = replace(model.merged_model, unit_positions="compact")
    [other] = model.score([request], 1)
    assert abs(other.log_prob - found.log_prob) > 1e-4


@pytest.mark.parametrize("scope", ["prompt", "all"])
@pytest.mark.parametrize("length", [LIMIT - 3, LIMIT - 2, LIMIT - 1, LIMIT, 3 * LIMIT])
def test_inputs_beyond_the_positions_lose_leading_units(scope: Merge, length: int) -> None:
    ids = np.array([6, 7, 8, 9, 10, 3, 4, 5] * 13)[:length]
    model = scorer(scope)
    starts, _ = model.merged_model.segment(ids)
    room = LIMIT - 1  # a continuation of two tokens feeds one
    first = next(start for start in starts.tolist() if length - start <= room)
    [found] = model.score([Request(ids, np.array([10, 10]))], 1)
    [short] = model.score([Request(ids[first:], np.array([10, 10]))], 1)
    assert found == short
    assert model.total.tokens == 2 * (length - first + 2)
