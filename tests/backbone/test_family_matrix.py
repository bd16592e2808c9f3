"""Every family of models is exact, or refused by name when it is wrapped.

The references run one row at a time, without a cache, on the embeddings that the model itself makes
of ids. In the quick tests a family meets one combination of rules and positions, in the full all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from threading import Event, Thread

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedConfig

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
from umim_core.backbone.attention_masks import attention_switched, attention_window
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

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing",
    "ignore::DeprecationWarning",
    "ignore:.*quantize_per_tensor",
)
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


@pytest.mark.parametrize("family", WINDOWED)
@torch.no_grad()
def test_plain_texts_and_single_continuations_are_the_models_own(family: str) -> None:
    backbone, _ = backbone_of(family, WINDOW)
    plain, rows = MergedModel.without_merging(backbone), [PROMPT, PROMPT[:13]]
    scored = score_continuations([row[:-3] for row in rows], [[row[-3:]] for row in rows], plain)
    for row, ours, [score] in zip(rows, token_log_probs(rows, plain), scored, strict=True):
        ids = torch.from_numpy(row)
        logits = backbone.model(input_ids=ids[None]).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
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
    backbone = wrap_backbone(random_model(lambda: config), None)
    backbone.check_window(16)
    with pytest.raises(GenerationError, match=r"attention window \(16\); got 17 units"):
        backbone.check_window(17)
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


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("name", ["gemma2", "cohere", "mpt"])
def test_a_deviation_below_a_hundredth_is_refused_in_every_data_type(
    name: str, dtype: torch.dtype
) -> None:
    config, word = REFUSED[name]
    model = random_model(config, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.01)  # logits so small that a cap of 30 changes no digit of them
    with pytest.raises(BackboneError, match=f"got {type(model).__name__}: .*{word}"):
        wrap_backbone(model, None)


class _Swallows(LlamaForCausalLM):
    """A model that takes position_ids and ignores them."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        rotate = self.model.rotary_emb.forward

        def columns(states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            return rotate(states, torch.arange(states.shape[1])[None].expand(len(states), -1))

        self.model.rotary_emb.forward = columns


class _Mixes(LlamaForCausalLM):
    """A model whose rows see what stands in the same column of other rows."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)

        def mix(module: nn.Module, args: object, out: Tensor) -> Tensor:
            return out + 0.01 * out.mean(dim=0, keepdim=True)

        self.model.norm.register_forward_hook(mix)


def llama() -> LlamaForCausalLM:
    return random_model(EXACT["llama"])


def attending(implementation: str) -> LlamaForCausalLM:
    model = llama()
    model.config._attn_implementation = implementation
    return model


def with_lora() -> PeftModel:
    adapted = get_peft_model(llama(), LoraConfig(target_modules=["q_proj", "lm_head"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora" in name:
                parameter.fill_(0.1)
    return adapted


def packed() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(llama(), {nn.Linear})


def nowhere() -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(EXACT["llama"]())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: _Swallows(EXACT["llama"]()), "position_ids and a 4-D mask .*_Swallows: off by"),
        (lambda: _Mixes(EXACT["llama"]()), "got _Mixes: off by"),
        (lambda: attending("flex_attention"), "additive mask; .*attn_implementation='sdpa'"),
        (lambda: attending("flash_attention_2"), "additive mask; .*attn_implementation='sdpa'"),
        (with_lora, "got Peft.*merge_and_unload"),
        (lambda: with_lora().base_model.model, "head must be one linear projection"),
        (packed, "plain tensors; got LlamaForCausalLM: .* is packed"),
        (nowhere, "LlamaForCausalLM: .*on no device"),
        (lambda: llama().model, "trunk and an output projection; got LlamaModel"),
    ],
)
def test_a_model_of_other_semantics_is_refused(make: Callable[[], nn.Module], said: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(BackboneError, match=said):
        wrap_backbone(make(), None)


def test_a_peft_model_is_taken_once_its_adapters_are_merged() -> None:
    assert wrap_backbone(with_lora().merge_and_unload(), None).vocab_size


def test_wrapping_leaves_the_callers_model_as_it_was() -> None:
    model = llama().train()
    hooks = copy.copy(model.lm_head._forward_hooks)
    backbone = wrap_backbone(model, None)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(module.training for module in model.modules())
    assert model.lm_head._forward_hooks == hooks
    assert not any(parameter.requires_grad for parameter in backbone.model.parameters())
    assert not any(module.training for module in backbone.model.modules())
    ours = {name: value.data_ptr() for name, value in backbone.model.named_parameters()}
    assert ours == {name: value.data_ptr() for name, value in model.named_parameters()}


@pytest.mark.parametrize("name", ["gemma", "gemma3_text", "biogpt", "xglm"])
def test_the_module_starts_at_the_size_of_scaled_embeddings(name: str) -> None:
    backbone = wrap_backbone(random_model(EXACT[name]), None)
    ids = torch.arange(backbone.vocab_size)
    assert torch.equal(backbone.embedding_table, backbone.embed(ids))
    assert backbone.embedding_std == pytest.approx(float(backbone.embed(ids).std()), rel=1e-6)
    assert backbone.embedding_std > 3.9 * float(backbone.embedding_weight.std())
