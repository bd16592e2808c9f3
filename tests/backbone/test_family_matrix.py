"""Every family of models is exact, or refused by name: generation, perplexity and scores.

The references run one row at a time, without a cache, on the embeddings that the model itself makes
of ids. In the quick tests a family meets one combination of rules and positions, in the full all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from threading import Event, Thread

import numpy as np
import pytest
import torch
from torch import Tensor

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
from support.merged_models import placed
from support.tiny_models import random_backbone
from umim_core.backbone.attention_masks import (
    attention_switched,
    attention_window,
    check_attention_window,
)
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.config.form import UnitPositions
from umim_core.errors import BackboneError, GenerationError
from umim_core.inference.engine import Engine
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import Forward
from umim_core.merging.continuations import score_continuations
from umim_core.merging.likelihood import token_log_probs
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.rules.matcher import Matcher

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
WINDOW = 6
WINDOWED = ["mistral", "gemma3_text", "gpt_oss", "gpt_neo", "olmo3", "exaone4", "starcoder2"]
PROMPT = np.concatenate(random_prompts(5, 3))


@cache
def backbone_of(family: str, window: int | None = None) -> tuple[Backbone, MergeModule]:
    config = EXACT[family]()
    if window is not None:
        name = "window_size" if family == "gpt_neo" else "sliding_window"
        setattr(config, name, window)
    dtype = torch.float32 if family in SINGLE else torch.float64
    backbone = wrap_backbone(random_model(lambda: config, dtype), None)
    return backbone, module_for(backbone)


def exact_steps(
    backbone: Backbone,
    module: MergeModule,
    matcher: Matcher,
    parts: Sequence[list[list[int]]],
    positions: UnitPositions = "compact",
) -> GenerateOptions:
    """Options whose observer compares every step of rows that begin with parts."""

    def compare(forward: Forward) -> None:
        prompts = [(matcher, [*known, list(forward.generated[b])]) for b, known in enumerate(parts)]
        found = from_scratch(backbone, module, prompts, positions)
        for b, (expected, units) in enumerate(found):
            assert forward.lengths[b] == units
            assert float((forward.logits[b] - expected).abs().max()) < TOLERANCE

    return settings(  # every few ids that the rules know complete one
        8,
        observer=compare,
        seed=1,
        do_sample=True,
        temperature=3.0,
        suppress_tokens=list(range(RULE_IDS, VOCAB)),
    )


@pytest.mark.parametrize(("family", "nested", "positions"), MATRIX)
@torch.no_grad()
def test_generation_equals_a_forward_from_scratch(
    family: str, nested: bool, positions: UnitPositions
) -> None:
    backbone, module = backbone_of(family)
    matcher = random_rules(3, infix_free=not nested)
    prompts = random_prompts(5, 3)
    parts = [[prompt.tolist()] for prompt in prompts]
    options = exact_steps(backbone, module, matcher, parts, positions)
    output = Engine(placed(MergedModel(backbone, module, matcher), positions)).generate(
        prompts, options
    )
    assert any(row.prompt_spans for row in output.rows)
    assert any(row.gen_kv_reduction > 0 for row in output.rows)


@pytest.mark.parametrize("family", WINDOWED)
@torch.no_grad()
def test_one_row_goes_beyond_the_window_exactly(family: str) -> None:
    backbone, module = backbone_of(family, WINDOW)
    matcher = random_rules(3, infix_free=False)
    engine = Engine(MergedModel(backbone, module, matcher))
    parts = [[PROMPT.tolist()]]
    options = exact_steps(backbone, module, matcher, parts)
    first = engine.generate([PROMPT], options)
    [row] = first.rows
    assert row.prompt_spans and row.gen_kv_reduction > 0
    assert min(row.cache_lengths) > WINDOW
    # The next turn is read in one piece on top of the cache.
    parts[0] += [list(row.ids[:-1]), list(row.ids[-1:]), PROMPT[:9].tolist()]
    engine.generate([PROMPT[:9]], options, past=first.state)


def plain_log_probs(backbone: Backbone, ids: np.ndarray) -> Tensor:
    """Log-probabilities of all tokens but the first, as the model itself computes them."""
    logits = backbone.model(input_ids=torch.from_numpy(ids)[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.from_numpy(ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize("family", WINDOWED)
@torch.no_grad()
def test_plain_texts_and_single_continuations_are_the_models_own(family: str) -> None:
    backbone, _ = backbone_of(family, WINDOW)
    plain, rows = MergedModel.without_merging(backbone), [PROMPT, PROMPT[:13]]
    scored = score_continuations([row[:-3] for row in rows], [[row[-3:]] for row in rows], plain)
    for row, ours, [score] in zip(rows, token_log_probs(rows, plain), scored, strict=True):
        expected = plain_log_probs(backbone, row)
        assert torch.allclose(ours, expected, rtol=0, atol=TOLERANCE)
        assert torch.allclose(score.log_probs, expected[-3:], rtol=0, atol=TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("positions", ["compact", "preserved"])
@pytest.mark.parametrize("family", EXACT)
@torch.no_grad()
def test_perplexity_equals_the_listing_of_two_stages(family: str, positions: UnitPositions) -> None:
    backbone, module = backbone_of(family)
    matcher = random_rules(3, infix_free=True)
    rows = [ids for ids in random_prompts(7, 4) if len(ids) > 1][:2]
    found = token_log_probs(rows, placed(MergedModel(backbone, module, matcher), positions))
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
    found = score_continuations(
        contexts, arrays, placed(MergedModel(backbone, module, matcher), positions)
    )
    for context, row, scores in zip(contexts, endings, found, strict=True):
        for ids, score in zip(row, scores, strict=True):
            known = [context.tolist(), *([token] for token in ids)]
            prompts = [(matcher, known[: 1 + k]) for k in range(len(ids))]
            steps = from_scratch(backbone, module, prompts, positions)
            for token, ours, (logits, _) in zip(ids, score.log_probs, steps, strict=True):
                assert abs(ours - logits.double().log_softmax(-1)[token]) < TOLERANCE


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_exact_is_refused_by_name(family: str) -> None:
    config, word = REFUSED[family]
    model = random_model(config)
    with pytest.raises(BackboneError, match=f"got {type(model).__name__}: .*{word}"):
        wrap_backbone(model, None)


def test_rows_together_stay_within_the_window_of_attention_layers() -> None:
    config = EXACT["mistral"]()
    config.sliding_window = 16
    check_attention_window(config, 16)
    with pytest.raises(GenerationError, match=r"attention window \(16\); got 17 units"):
        check_attention_window(config, 17)
    with pytest.raises(GenerationError, match="full or sliding-window attention"):
        attention_window(REFUSED["mamba"][0]())


def test_a_thread_that_switches_attention_waits_for_one_that_has() -> None:
    """It would end the other's switch within a forward: 16 of 60 losses were wrong."""
    model = random_backbone("llama").model
    entered, seen = Event(), []

    def switch() -> None:
        with attention_switched(model, "eager"):
            seen.append(model.config._attn_implementation)
            entered.set()

    with attention_switched(model, "eager"), attention_switched(model, "sdpa"):  # one thread may
        other = Thread(target=switch)
        other.start()
        assert not entered.wait(0.2)
        assert model.config._attn_implementation == "sdpa"
    other.join()
    assert seen == ["eager"] and model.config._attn_implementation == "sdpa"
