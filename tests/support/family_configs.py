"""Tiny configurations of causal language models that transformers has, by family."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from support import tiny_models

VOCAB, HIDDEN, POSITIONS = 19, 16, 64
PLAIN = tiny_models.SIZES | {"vocab_size": VOCAB}
GROUPED = {**PLAIN, "num_key_value_heads": 2}
SIZED = {**GROUPED, "head_dim": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": POSITIONS}


def _config(model_type: str, **settings: object) -> Callable[[], PreTrainedConfig]:
    return partial(AutoConfig.for_model, model_type, **settings)


def random_model(
    config: Callable[[], PreTrainedConfig], dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A model of random weights; a family's experts run in any data type."""
    settings = config()
    settings._experts_implementation = "eager"
    return tiny_models.random_model(settings).to(dtype)


def _configs(settings: dict[str, Any], *names: str) -> dict[str, Callable[[], PreTrainedConfig]]:
    return {name: _config(name, **settings) for name in names}


# Families that must be exact.
EXACT: dict[str, Callable[[], PreTrainedConfig]] = {
    **_configs(PLAIN, "phi", "gpt2", "gpt_bigcode", "gpt_neox", "biogpt", "persimmon"),
    **_configs(GROUPED, "llama", "qwen2", "phi3", "stablelm", "olmo", "olmo2", "nemotron"),
    **_configs(GROUPED, "smollm3", "arcee"),
    **_configs(SIZED, "qwen3", "gemma", "helium", "glm", "glm4", "ernie4_5", "seed_oss"),
    "mistral": _config("mistral", **GROUPED, sliding_window=POSITIONS),
    "mixtral": _config("mixtral", **GROUPED, **LOCAL_EXPERTS),
    "qwen2_moe": _config("qwen2_moe", **GROUPED, **EXPERTS, shared_expert_intermediate_size=8),
    "qwen3_moe": _config("qwen3_moe", **SIZED, **EXPERTS),
    "gemma2-uncapped": _config("gemma2", **SIZED, **LAYERS, final_logit_softcapping=None),
    "gemma3_text": _config("gemma3_text", **SIZED, **LAYERS),
    "gptj": _config("gptj", **PLAIN, rotary_dim=4),
    "codegen": _config("codegen", **PLAIN, rotary_dim=4),
    "gpt_neo": _config(
        "gpt_neo", **PLAIN, attention_types=[[["global", "local"], 1]], window_size=POSITIONS
    ),
    "gpt_oss": _config("gpt_oss", **SIZED, **LAYERS, **LOCAL_EXPERTS),
    "opt": _config("opt", **PLAIN, word_embed_proj_dim=HIDDEN, ffn_dim=24, init_std=0.2),
    "falcon": _config("falcon", **PLAIN, alibi=False),
    "starcoder2": _config("starcoder2", **GROUPED, sliding_window=POSITIONS),
    "olmo3": _config("olmo3", **GROUPED, **LAYERS),
    "olmoe": _config("olmoe", **GROUPED, num_experts=4, num_experts_per_tok=2),
    "granite-unscaled": _config("granite", **GROUPED, embedding_multiplier=3.0),
    "xglm": _config("xglm", **PLAIN, ffn_dim=24, init_std=0.2),
    "deepseek_v3": _config(
        "deepseek_v3", **PLAIN, num_key_value_heads=4, q_lora_rank=8, kv_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=8,
        first_k_dense_replace=1,
    ),
    "exaone4": _config("exaone4", **GROUPED, **LAYERS),
}  # fmt: skip
# Families that must be refused, and what the error says.
REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "gemma2": (_config("gemma2", **SIZED, **LAYERS, final_logit_softcapping=30.0), "capped"),
    "cohere": (_config("cohere", **GROUPED, logit_scale=0.0625), "scaled"),
    "cohere2": (_config("cohere2", **GROUPED, **LAYERS, logit_scale=0.0625), "scaled"),
    "granite": (_config("granite", **GROUPED, logits_scaling=8.0), "scaled"),
    "mpt": (
        _config("mpt", vocab_size=VOCAB, d_model=HIDDEN, n_layers=2, n_heads=4, max_seq_len=64),
        "positions",
    ),
    "bloom": (
        _config("bloom", vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=2, n_head=4),
        "positions",
    ),
    "falcon-alibi": (
        _config("falcon", **PLAIN, alibi=True, new_decoder_architecture=False),
        "not supported",
    ),
    "mamba": (_config("mamba", vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2), "state"),
    "recurrent_gemma": (
        _config("recurrent_gemma", **PLAIN, lru_width=16, block_types=["recurrent", "attention"]),
        "linear_attention",
    ),
    "jamba": (
        _config("jamba", **GROUPED, attn_layer_period=2, attn_layer_offset=1, num_experts=2),
        "linear_attention",
    ),
    "rwkv": (_config("rwkv", vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2), "position"),
    "ctrl": (
        _config("ctrl", vocab_size=VOCAB, n_embd=16, dff=24, n_layer=2, n_head=4, n_positions=64),
        "not supported",
    ),
    "nanochat": (_config("nanochat", **GROUPED, final_logit_softcapping=15.0), "capped"),
}
