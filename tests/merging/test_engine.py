"""The engine: hand-worked cache lengths, recompute-from-scratch after every step, batches, limits.

``chain`` is a real Llama whose blocks add nothing and whose head is a shift: after token i it
always chooses i + 1, and a surrogate that copies its last token keeps the chain going. So every
cache length below can be checked by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from umim_core.backbone import Backbone, wrap_backbone
from umim_core.errors import GenerationError
from umim_core.merging.engine import Engine
from umim_core.merging.module import MergeModule
from umim_core.merging.outputs import Forward, RowOutput
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

VOCAB = 11
LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**LLAMA_LIKE),
    "llama-tied": lambda: LlamaConfig(**LLAMA_LIKE, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**LLAMA_LIKE),
    "mistral": lambda: MistralConfig(**LLAMA_LIKE, sliding_window=96),
    "gpt2": lambda: GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=96),
    "gpt2-untied": lambda: GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=96, tie_word_embeddings=False
    ),
    "gpt-neo": lambda: GPTNeoConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=96,
        max_position_embeddings=96,
    ),
    "gpt-neox": lambda: GPTNeoXConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=96,
    ),
}
# transformers computes some parts in float32 whatever the model: GPT-Neo's scores and the softmax
# of Llama-like eager attention.
MATRIX = [
    pytest.param(name, dtype, attention, tolerance, id=f"{name}-{attention}-{str(dtype)[6:]}")
    for name in CONFIGS
    for attention in (("eager",) if name == "gpt-neo" else ("sdpa", "eager"))
    for dtype, tolerance in (
        (torch.float32, 1e-5),
        (torch.float64, 1e-5 if attention == "eager" and "gpt2" not in name else 1e-10),
    )
]


def build(name: str, dtype: torch.dtype = torch.float64, attention: str = "sdpa") -> Backbone:
    config = CONFIGS[name]()
    config.vocab_size = VOCAB
    config.initializer_range = 0.2
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    if name == "gpt-neo":
        attention = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return wrap_backbone(model.to(dtype), None)


def module_for(backbone: Backbone) -> MergeModule:
    module = MergeModule(backbone.hidden_size).to(backbone.dtype)
    module.initialise(0.2, torch.Generator().manual_seed(1))
    return module.eval().requires_grad_(False)


def random_rules(seed: int, infix_free: bool) -> Matcher:
    """Rules over the whole alphabet, dense enough that every few tokens complete one."""
    rng = np.random.default_rng(seed)
    if infix_free:
        spans = {tuple(rng.integers(0, VOCAB, 2).tolist()) for _ in range(40)}
    else:
        spans = {tuple(rng.integers(0, 5, rng.integers(2, 5)).tolist()) for _ in range(60)}
        spans |= {(a, b) for a in range(VOCAB) for b in range(0, VOCAB, 3)}
        spans |= {(a, 0, b) for a in range(VOCAB) for b in range(VOCAB)}
    rules = RuleSet.from_spans(spans)
    assert rules.infix_free is infix_free
    return Matcher(rules)


def random_prompts(seed: int, rows: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(1, 14)) for _ in range(rows)]


def settings(max_new_tokens: int = 24, **options: object) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=max_new_tokens, **options)


SAMPLED = {"do_sample": True, "temperature": 1.5}


def from_scratch(
    backbone: Backbone, module: MergeModule, matcher: Matcher, parts: Sequence[Sequence[int]]
) -> tuple[Tensor, int]:
    """Logits after parts that are matched apart, in one fresh forward, and the units they make."""
    units = []
    for ids in parts:
        array = np.array(ids, dtype=np.int64)
        for start, length in zip(*matcher.segment(array), strict=True):
            span = backbone.embed(torch.tensor(array[start : start + length]))
            units.append(span if length == 1 else module(span[None], torch.tensor([length])))
    return backbone.model(inputs_embeds=torch.cat(units)[None]).logits[0, -1], len(units)


@pytest.mark.parametrize("infix_free", [True, False], ids=["infix-free", "nested"])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("name", "dtype", "attention", "tolerance"), MATRIX)
@torch.no_grad()
def test_every_step_equals_a_forward_from_scratch(
    name: str, dtype: torch.dtype, attention: str, tolerance: float, rows: int, infix_free: bool
) -> None:
    backbone = build(name, dtype, attention)
    module, matcher = module_for(backbone), random_rules(3, infix_free)
    prompts = random_prompts(5, rows)
    compared = 0

    def compare(forward: Forward) -> None:
        nonlocal compared
        for b, prompt in enumerate(prompts):
            if forward.running[b]:
                expected, units = from_scratch(
                    backbone, module, matcher, [prompt.tolist(), forward.generated[b]]
                )
                assert forward.lengths[b] == units
                error = float((forward.logits[b] - expected).abs().max())
                assert error <= tolerance, (b, forward.generated[b], error)
                compared += 1

    output = Engine(backbone, module, matcher).generate(
        prompts, settings(**SAMPLED), observer=compare
    )
    assert compared == rows * 24
    assert output.gen_kv_reduction > 0.1


@pytest.mark.parametrize("seed", range(5))
def test_decode_spans_are_the_segmentation_of_the_generated_ids_alone(seed: int) -> None:
    backbone = build("gpt2")
    matcher = random_rules(seed, infix_free=False)
    output = Engine(backbone, module_for(backbone), matcher).generate(
        random_prompts(seed, 4), settings(**SAMPLED), seed=seed
    )
    for row in output.rows:
        starts, lengths = matcher.segment(np.array(row.ids[:-1]))
        units = zip(starts.tolist(), lengths.tolist(), strict=True)
        assert row.generated_spans == tuple((s, n) for s, n in units if n > 1)
        assert row.cache_lengths[-1] - row.cache_lengths[0] == len(starts)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_alone_equals_the_row_in_a_batch(name: str, dtype: torch.dtype) -> None:
    backbone = build(name, dtype)
    engine = Engine(backbone, module_for(backbone), random_rules(1, infix_free=False))
    prompts = random_prompts(2, 8)
    ends = settings(eos_token_id=[3, 7])  # rows end at different steps
    together = engine.generate(prompts, ends)
    assert len({len(row.ids) for row in together.rows}) > 1
    for prompt, row in zip(prompts, together.rows, strict=True):
        assert engine.generate([prompt], ends).rows == (row,)


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_empty_rules_give_the_base_models_bits_at_batch_one(name: str, attention: str) -> None:
    backbone = build(name, torch.float32, attention)
    engine = Engine(backbone, None, Matcher(RuleSet.from_spans([])))
    for prompt in random_prompts(9, 5):
        ours: list[Tensor] = []
        output = engine.generate(
            [prompt], settings(), observer=lambda forward, ours=ours: ours.append(forward.logits)
        )
        theirs = backbone.model.generate(
            torch.tensor(prompt)[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert list(output.rows[0].ids) == theirs.sequences[0, len(prompt) :].tolist()
        assert torch.equal(torch.cat(ours), torch.cat(theirs.logits))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_empty_rules_give_the_base_models_ids_in_batches(name: str) -> None:
    backbone = build(name)
    prompts = random_prompts(11, 50)
    output = Engine(backbone, None, None).generate(prompts, settings(12))
    for prompt, row in zip(prompts, output.rows, strict=True):
        theirs = backbone.model.generate(
            torch.tensor(prompt)[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
        )
        assert list(row.ids) == theirs[0, len(prompt) :].tolist()


class LastToken:
    """A span merger that copies the last token's embedding."""

    def __call__(self, spans: Tensor, lengths: Tensor) -> Tensor:
        return spans[torch.arange(len(spans)), lengths - 1]


@pytest.fixture(scope="module")
def chain() -> Backbone:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(16))
        model.lm_head.weight.copy_(torch.eye(16).roll(1, dims=0))  # token i raises i + 1
    return wrap_backbone(model, None)


def follow(
    chain: Backbone, rules: list[tuple[int, ...]], prompt: list[int], new: int, **options: object
) -> RowOutput:
    engine = Engine(chain, LastToken(), Matcher(RuleSet.from_spans(rules)))
    return engine.generate([prompt], settings(new, **options)).rows[0]


def test_a_merge_replaces_its_units_by_one(chain: Backbone) -> None:
    row = follow(chain, [(3, 4)], [0, 1], 5)
    assert row.ids == (2, 3, 4, 5, 6)
    #                       prompt, 2, 3, (3 4), 5; the last token is not fed
    assert row.cache_lengths == (2, 3, 4, 4, 5)
    assert row.generated_spans == ((1, 2),)
    assert row.stop_reason == "length"


def test_a_merge_right_after_the_prompt_leaves_the_prompt_alone(chain: Backbone) -> None:
    row = follow(chain, [(2, 3, 4)], [0, 1], 4)
    assert row.cache_lengths == (2, 3, 4, 3)


def test_nested_rules_merge_in_successive_steps(chain: Backbone) -> None:
    row = follow(chain, [(2, 3), (2, 3, 4), (2, 3, 4, 5)], [1], 6)
    assert row.cache_lengths == (1, 2, 2, 2, 2, 3)
    assert row.generated_spans == ((0, 4),)


def test_rules_never_cross_from_the_prompt_into_generated_tokens(chain: Backbone) -> None:
    row = follow(chain, [(1, 2)], [0, 1], 3)
    assert (row.prompt_spans, row.generated_spans) == ((), ())
    assert row.cache_lengths == (2, 3, 4)


def test_prompt_spans_shorten_the_prefill(chain: Backbone) -> None:
    row = follow(chain, [(0, 1), (4, 5, 6)], [0, 1, 9, 4, 5, 6], 2)
    assert row.prompt_spans == ((0, 2), (3, 3))
    assert row.cache_lengths[0] == 3
    assert row.ids == (7, 8)


def test_an_eos_that_would_complete_a_rule_ends_the_row_unmerged(chain: Backbone) -> None:
    row = follow(chain, [(3, 4)], [0, 1], 9, eos_token_id=4)
    assert row.ids == (2, 3, 4)
    assert row.generated_spans == ()
    assert row.cache_lengths == (2, 3, 4)
    assert row.stop_reason == "eos"


@pytest.mark.parametrize(
    ("merge_prompt", "merge_decode", "lengths"),
    [
        (True, True, (1, 2, 2)),
        (True, False, (1, 2, 3)),
        (False, True, (2, 3, 3)),
        (False, False, (2, 3, 4)),
    ],
)
def test_prompt_and_decode_merging_switch_separately(
    chain: Backbone, merge_prompt: bool, merge_decode: bool, lengths: tuple[int, ...]
) -> None:
    engine = Engine(chain, LastToken(), Matcher(RuleSet.from_spans([(0, 1), (2, 3)])))
    output = engine.generate(
        [[0, 1]], settings(3), merge_prompt=merge_prompt, merge_decode=merge_decode
    )
    assert output.rows[0].cache_lengths == lengths
    assert output.rows[0].ids == (2, 3, 4)


def test_reductions_are_the_realised_ones(chain: Backbone) -> None:
    engine = Engine(chain, LastToken(), Matcher(RuleSet.from_spans([(0, 1), (3, 4)])))
    output = engine.generate([[0, 1], [9, 0, 1, 2]], settings(4))
    assert output.token_reduction == pytest.approx(2 / 6)
    # row 0 feeds 2 3 4 and keeps 2 (3 4); row 1 feeds 3 4 5 and keeps (3 4) 5
    assert output.gen_kv_reduction == pytest.approx(2 / 6)


def test_prompts_up_to_the_last_position_are_served(chain: Backbone) -> None:
    # 30 units, 3 new tokens, the last one never fed: exactly 32 positions
    assert len(follow(chain, [], [0] * 30, 3).ids) == 3
    with pytest.raises(GenerationError, match="32 positions; got 30 units \\+ 4 new tokens"):
        follow(chain, [], [0] * 30, 4)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "at least one prompt"),
        ([[1], []], "prompt 1"),
        ([[1, 16]], "between 0 and 15; got prompt 0: 1 .. 16"),
        ([[-1]], "between 0 and 15"),
        ([np.zeros((1, 2), dtype=np.int64)], "1-D"),
        ([np.array([0.5])], "1-D array of at least one token id"),
    ],
)
def test_bad_prompts_are_refused(chain: Backbone, prompts: list[object], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        Engine(chain, None, None).generate(prompts, settings(2))


@pytest.mark.parametrize("new_tokens", [0, -3])
def test_a_request_for_no_token_is_refused(chain: Backbone, new_tokens: int) -> None:
    config = settings(1)
    config.max_new_tokens = new_tokens
    with pytest.raises(GenerationError, match="max_new_tokens must be at least 1"):
        Engine(chain, None, None).generate([[1]], config)


def test_rules_without_a_module_are_refused(chain: Backbone) -> None:
    with pytest.raises(GenerationError, match="merge module"):
        Engine(chain, None, Matcher(RuleSet.from_spans([(1, 2)])))


def test_a_backbone_without_rollback_is_refused() -> None:
    config = MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, state_size=2)
    with pytest.raises(GenerationError, match="full or sliding-window attention"):
        Engine(wrap_backbone(MambaForCausalLM(config), None), None, None)


def test_generation_beyond_a_sliding_window_is_refused() -> None:
    config = MistralConfig(**LLAMA_LIKE, vocab_size=VOCAB, sliding_window=8)
    backbone = wrap_backbone(AutoModelForCausalLM.from_config(config), None)
    with pytest.raises(GenerationError, match="up to their window"):
        Engine(backbone, None, None).generate([[1, 2, 3]], settings(7))
