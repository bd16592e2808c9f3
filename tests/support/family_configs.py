"""Tiny configurations of causal language models that transformers has, by family."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from support import tiny_models

VOCAB, POSITIONS = 19, 64
GROUPED = {"num_key_value_heads": 2}
SIZED = {**GROUPED, "head_dim": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": POSITIONS}
Config = Callable[[], PreTrainedConfig]


def _config(family: str, **own: object) -> Config:
    return partial(tiny_models.tiny_config, family, vocab_size=VOCAB, **own)


def _configs(*families: str, **own: object) -> dict[str, Config]:
    return {family: _config(family, **own) for family in families}


def random_model(config: Config, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of random weights; a family's experts run in any data type."""
    settings = config()
    settings._experts_implementation = "eager"
    return tiny_models.random_model(settings).to(dtype)


# Families that must be exact.
EXACT: dict[str, Config] = {
    **_configs("phi", "gpt2", "gpt_bigcode", "gpt_neox", "biogpt", "persimmon", "gpt_neo"),
    **_configs("llama", "qwen2", "phi3", "stablelm", "olmo", "olmo2", "nemotron", **GROUPED),
    **_configs("smollm3", "arcee", "mistral", **GROUPED),
    **_configs("qwen3", "gemma", "helium", "glm", "glm4", "ernie4_5", "seed_oss", **SIZED),
    **_configs("gptj", "codegen", rotary_dim=4),
    **_configs("opt", "xglm", ffn_dim=24, init_std=0.2),
    **_configs("olmo3", "exaone4", **GROUPED, **LAYERS),
    "gemma3_text": _config("gemma3_text", **SIZED, **LAYERS),
    "gemma2-uncapped": _config("gemma2", **SIZED, **LAYERS, final_logit_softcapping=None),
    "mixtral": _config("mixtral", **GROUPED, **LOCAL_EXPERTS),
    "qwen2_moe": _config("qwen2_moe", **GROUPED, **EXPERTS, shared_expert_intermediate_size=8),
    "qwen3_moe": _config("qwen3_moe", **SIZED, **EXPERTS),
    "olmoe": _config("olmoe", **GROUPED, num_experts=4, num_experts_per_tok=2),
    "gpt_oss": _config("gpt_oss", **SIZED, **LAYERS, **LOCAL_EXPERTS),
    "falcon": _config("falcon", alibi=False),
    "starcoder2": _config("starcoder2", **GROUPED, sliding_window=POSITIONS),
    "granite-unscaled": _config("granite", **GROUPED, embedding_multiplier=3.0),
    "deepseek_v3": _config(
        "deepseek_v3", num_key_value_heads=4, q_lora_rank=8, kv_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=8,
        first_k_dense_replace=1,
    ),
}  # fmt: skip
# Families that must be refused, and what the error says.
REFUSED: dict[str, tuple[Config, str]] = {
    "gemma2": (_config("gemma2", **SIZED, **LAYERS, final_logit_softcapping=30.0), "capped"),
    "cohere": (_config("cohere", **GROUPED, logit_scale=0.0625), "scaled"),
    "cohere2": (_config("cohere2", **GROUPED, **LAYERS, logit_scale=0.0625), "scaled"),
    "granite": (_config("granite", **GROUPED, logits_scaling=8.0), "scaled"),
    "mpt": (_config("mpt"), "positions"),
    "bloom": (_config("bloom"), "positions"),
    "falcon-alibi": (
        _config("falcon", alibi=True, new_decoder_architecture=False),
        "not supported",
    ),
    "mamba": (_config("mamba"), "state"),
    "recurrent_gemma": (
        _config("recurrent_gemma", lru_width=16, block_types=["recurrent", "attention"]),
        "linear_attention",
    ),
    "jamba": (
        _config("jamba", **GROUPED, attn_layer_period=2, attn_layer_offset=1, num_experts=2),
        "linear_attention",
    ),
    "rwkv": (_config("rwkv"), "position"),
    "ctrl": (_config("ctrl", dff=24), "not supported"),
    "nanochat": (_config("nanochat", **GROUPED, final_logit_softcapping=15.0), "capped"),
}
