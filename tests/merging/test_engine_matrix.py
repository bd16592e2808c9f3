"""The engine over a matrix of tiny random backbones: rollback, batches and empty rules."""

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
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from umim_core.backbone import Backbone, wrap_backbone
from umim_core.merging.engine import Engine
from umim_core.merging.module import MergeModule
from umim_core.merging.outputs import Forward
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
    for attention in ("sdpa", "eager")
    if (attention == "sdpa" and name != "gpt-neo")
    or (attention == "eager" and name in ("llama", "gpt2", "gpt-neo"))
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
        spans = {tuple(rng.integers(0, VOCAB, 2).tolist()) for _ in range(100)}
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


def settings(max_new_tokens: int = 16, **options: object) -> GenerationConfig:
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
    assert compared == rows * 16
    assert any(row.gen_kv_reduction > 0 for row in output.rows)  # something was rolled back


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
            max_new_tokens=16,
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
