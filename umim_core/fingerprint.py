"""Fingerprints: what a tokenizer and a model are, independent of where they were loaded from."""

from __future__ import annotations

import json
from typing import Final

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from umim_core.artifacts import canonical_json, sha256_bytes


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of a tokenizer's special tokens."""
    return frozenset(int(i) for i in tokenizer.all_special_ids)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of what decides which ids a text gets.

    It covers vocabulary, merges, normaliser, pre-tokenizer and added tokens; padding, truncation
    and the chat template are left out. Tokenizers of one size with different vocabularies differ.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state: object = {
            "vocab": tokenizer.get_vocab(),
            "class": type(tokenizer).__name__,
            "special": tokenizer.all_special_tokens,
        }
    else:
        pipeline: dict[str, object] = json.loads(backend.to_str())
        ignored = ("padding", "truncation", "post_processor")
        state = {name: part for name, part in pipeline.items() if name not in ignored}
    return sha256_bytes(canonical_json(state).encode())


# Fields of a configuration that say how a model is stored or run, not what it computes.
_NOT_ARCHITECTURE: Final = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return the SHA-256 of what a model computes: architecture, configuration and weights.

    Weights are hashed as bfloat16, so that one model loaded as float32, bfloat16 or float64 keeps
    its fingerprint as long as it was published in bfloat16 or wider. Of the configuration, what
    differs from its class's defaults counts (rotary base, norm epsilon, activation ...).
    """
    config = model.config.to_diff_dict()
    kept = {name: value for name, value in config.items() if name not in _NOT_ARCHITECTURE}
    lines = [str(model.config.model_type), canonical_json(kept)]
    for name, value in sorted(model.state_dict().items()):
        raw = value.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy()
        lines.append(f"{name} {tuple(value.shape)} {sha256_bytes(raw.tobytes())}")
    return sha256_bytes("\n".join(lines).encode())
