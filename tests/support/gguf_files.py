"""GGUF files of tiny models, written as llama.cpp does, with the gguf package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from gguf import GGUFValueType
from transformers import PreTrainedModel

from support.tiny_models import byte_level_bpe, random_model, tiny_config

SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT: Final = [
    "The cat sat on the mat and the dog sat on the log; it was 1984 or 2024, I'm not sure.",
    "def mean(values):\n    return sum(values) / len(values)\n",
] * 4
_TYPES: Final = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
    list: GGUFValueType.ARRAY,
}


def tiny_bpe() -> dict[str, Any]:
    """Return the ``tokenizer.json`` of a byte-level BPE of about 320 tokens."""
    return dict(json.loads(byte_level_bpe(_TEXT, 320, SPECIAL).to_str()))


def tiny_llama(pipeline: dict[str, Any], seed: int = 0, **settings: object) -> PreTrainedModel:
    """Return a random Llama with the vocabulary of a ``tokenizer.json``."""
    sizes = {"vocab_size": len(pipeline["model"]["vocab"]), "tie_word_embeddings": True}
    sizes |= {"hidden_size": 32, "intermediate_size": 64}
    return random_model(tiny_config("llama", **sizes | settings), seed)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    pipeline: dict[str, Any],
    pre: str = "gpt-2",
    *,
    kind: str = "F32",
    entries: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    roles: dict[str, int] | None = None,
    template: str = TEMPLATE,
) -> Path:
    """Write a Llama, Qwen 2, Qwen 3 or Phi 3 of transformers and a tokenizer as a GGUF file.

    The tokenizer is the ``tokenizer.json`` of a byte-level BPE; ``kind`` is the type of matrices,
    vectors are F32, as llama.cpp's are. Of further ``entries``, None takes an entry out; ``roles``
    are ids of ``bos``, ``eos``, ``padding``, ``unknown``.
    """
    config = model.config
    arch = str(config.model_type)
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    vocabulary = dict(pipeline["model"]["vocab"])
    kinds = dict.fromkeys(vocabulary.values(), 1)
    for token in pipeline["added_tokens"]:
        vocabulary[token["content"]] = token["id"]
        kinds[token["id"]] = 3 if token["special"] else 4
    assert sorted(vocabulary.values()) == list(range(len(kinds)))
    merges = pipeline["model"]["merges"]
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": head_dim,
        "vocab_size": config.vocab_size,
    }
    ids = {"bos": 1, "eos": 2, "padding": 2, "unknown": 0} if roles is None else roles
    metadata = {
        "general.name": "Tiny",
        **{f"{arch}.{key}": value for key, value in sizes.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": sorted(vocabulary, key=lambda token: vocabulary[token]),
        "tokenizer.ggml.token_type": [kinds[i] for i in range(len(kinds))],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.chat_template": template,
        **{f"tokenizer.ggml.{role}_token_id": i for role, i in ids.items()},
        **(entries or {}),
    }
    writer = gguf.GGUFWriter(str(path), metadata.pop("general.architecture", arch))
    for key, value in metadata.items():
        if value is not None:
            writer.add_key_value(key, value, _TYPES[type(value)])
    for name, values in (_tensors(model, arch) | (tensors or {})).items():
        plain = values.ndim == 1 or name in (tensors or {})
        form = gguf.GGMLQuantizationType["F32" if plain else kind]
        writer.add_tensor(name, gguf.quantize(values, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: PreTrainedModel, arch: str) -> dict[str, np.ndarray]:
    """A model's tensors under the names of the gguf package, rotary rows as llama.cpp has them."""
    config = model.config
    names = gguf.get_tensor_name_map(
        {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch], config.num_hidden_layers
    )
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.detach().to(torch.float32).numpy()
        projection = name.split(".")[-2]
        if arch == "llama" and projection in heads:  # rotary pairs stand side by side
            halves = values.reshape(heads[projection], 2, -1, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        key = names.get_name(name, try_suffixes=(".weight", ".bias"))
        found[key] = np.ascontiguousarray(values)
    return found
