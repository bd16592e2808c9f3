"""Every family of models is exact, or refused by name: generation, perplexity and scores.

The references run one row at a time, without a cache, on the embeddings that the model itself makes
of ids. In the quick tests a family meets one combination of rules and positions, in the full all.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from support.engine_matrix import VOCAB as RULE_IDS
from support.engine_matrix import (
    from_scratch,
    log_probs_from_scratch,
    module_for,
    random_prompts,
    random_rules,
    settings,
)
from support.family_configs import EXACT, REFUSED, VOCAB, random_model
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.config.form import UnitPositions
from umim_core.errors import BackboneError
from umim_core.inference.engine import Engine
from umim_core.inference.outputs import Forward
from umim_core.merging.continuations import score_continuations
from umim_core.merging.likelihood import token_log_probs
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule

# transformers computes some parts in single precision whatever the model: scores, softmaxes, norms.
TOLERANCE = 1e-5
SINGLE = {"xglm"}  # its own mask cannot be made in double precision
COMBINATIONS = [
    (nested, positions) for nested in (False, True) for positions in UnitPositions.__args__
]
MATRIX = [
    pytest.param(
        family,
        nested,
        positions,
        id=f"{family}-{'nested' if nested else 'infix-free'}-{positions}",
        marks=[] if combination == number % len(COMBINATIONS) else [pytest.mark.full],
    )
    for number, family in enumerate(EXACT)
    for combination, (nested, positions) in enumerate(COMBINATIONS)
]


@cache
def backbone_of(family: str) -> tuple[Backbone, MergeModule]:
    dtype = torch.float32 if family in SINGLE else torch.float64
    backbone = wrap_backbone(random_model(EXACT[family], dtype), None)
    return backbone, module_for(backbone)


@pytest.mark.parametrize(("family", "nested", "positions"), MATRIX)
@torch.no_grad()
def test_generation_equals_a_forward_from_scratch(
    family: str, nested: bool, positions: UnitPositions
) -> None:
    backbone, module = backbone_of(family)
    matcher = random_rules(3, infix_free=not nested)
    prompts = random_prompts(5, 3)
    errors = []

    def compare(forward: Forward) -> None:
        for b, prompt in enumerate(prompts):
            parts = [prompt.tolist(), forward.generated[b]]
            expected, units = from_scratch(backbone, module, matcher, parts, positions)
            assert forward.lengths[b] == units
            errors.append(float((forward.logits[b] - expected).abs().max()))

    dense = settings(  # every few ids that the rules know complete one
        6,
        observer=compare,
        do_sample=True,
        temperature=3.0,
        suppress_tokens=list(range(RULE_IDS, VOCAB)),
    )
    output = Engine(MergedModel(backbone, module, matcher, positions)).generate(prompts, dense)
    assert max(errors) < TOLERANCE
    assert any(row.prompt_spans for row in output.rows)
    assert any(row.gen_kv_reduction > 0 for row in output.rows)


@pytest.mark.full
@pytest.mark.parametrize("positions", ["compact", "preserved"])
@pytest.mark.parametrize("family", EXACT)
@torch.no_grad()
def test_perplexity_equals_the_listing_of_two_stages(family: str, positions: UnitPositions) -> None:
    backbone, module = backbone_of(family)
    matcher = random_rules(3, infix_free=True)
    rows = [ids for ids in random_prompts(7, 4) if len(ids) > 1][:2]
    found = token_log_probs(rows, MergedModel(backbone, module, matcher, positions))
    for ids, ours in zip(rows, found, strict=True):
        expected = log_probs_from_scratch(backbone, module, matcher, ids, positions)
        assert torch.allclose(ours, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("family", "nested", "positions"), MATRIX)
@torch.no_grad()
def test_scores_equal_one_forward_per_continuation(
    family: str, nested: bool, positions: UnitPositions
) -> None:
    backbone, module = backbone_of(family)
    matcher = random_rules(3, infix_free=not nested)
    contexts, endings = random_prompts(9, 2), [[[3, 1, 4], [2]], [[5, 9], [8, 7]]]
    arrays = [[np.array(ids) for ids in row] for row in endings]
    found = score_continuations(contexts, arrays, MergedModel(backbone, module, matcher, positions))
    for context, row, scores in zip(contexts, endings, found, strict=True):
        for ids, score in zip(row, scores, strict=True):
            parts = [context.tolist()]
            for token, ours in zip(ids, score.log_probs.tolist(), strict=True):
                logits, _ = from_scratch(backbone, module, matcher, parts, positions)
                assert abs(ours - float(logits.double().log_softmax(-1)[token])) < TOLERANCE
                parts.append([token])


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_exact_is_refused_by_name(family: str) -> None:
    config, word = REFUSED[family]
    model = random_model(config)
    with pytest.raises(BackboneError, match=f"got {type(model).__name__}: .*{word}"):
        wrap_backbone(model, None)
