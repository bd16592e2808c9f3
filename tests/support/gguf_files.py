"""GGUF files of tiny models, written as llama.cpp does, with the gguf package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel

from support.tiny_models import random_model, tiny_config

LLAMA3: Final[dict[str, Any]] = {  # rotary embeddings of Llama 3
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT: Final = [
    "The cat sat on the mat and the dog sat on the log; it was 1984 or 2024, I'm not sure.",
    "def mean(values):\n    return sum(values) / len(values)\n",
] * 4


def tiny_bpe(size: int = 320) -> dict[str, Any]:
    """Return the ``tokenizer.json`` of a byte-level BPE of about ``size`` tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_TEXT, trainer)
    return dict(json.loads(bpe.to_str()))


def tiny_llama(pipeline: dict[str, Any], seed: int = 0, **settings: object) -> PreTrainedModel:
    """Return a random Llama with the vocabulary of a ``tokenizer.json``."""
    config = tiny_config(
        "llama",
        vocab_size=len(pipeline["model"]["vocab"]),
        hidden_size=32,
        intermediate_size=64,
        tie_word_embeddings=True,
        **settings,
    )
    return random_model(config, seed)


def token_table(pipeline: dict[str, Any]) -> tuple[list[str], list[int]]:
    """Return the tokens of a ``tokenizer.json`` by id, and their types in a GGUF file."""
    vocab: dict[str, int] = dict(pipeline["model"]["vocab"])
    added = {token["content"]: token for token in pipeline["added_tokens"]}
    vocab |= {content: token["id"] for content, token in added.items()}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    assert [vocab[token] for token in tokens] == list(range(len(tokens)))
    kinds = [1 if token not in added else 3 if added[token]["special"] else 4 for token in tokens]
    return tokens, kinds


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
    """Write a model and a tokenizer as a GGUF file.

    Args:
        path: The file.
        model: A Llama, Qwen 2, Qwen 3 or Phi 3 of transformers.
        pipeline: The ``tokenizer.json`` of a byte-level BPE.
        pre: The name of its pre-tokenizer.
        kind: Type of its matrices; vectors are F32, as llama.cpp's are.
        entries: Further metadata; None takes an entry out.
        tensors: Further tensors.
        roles: Ids by role: ``bos``, ``eos``, ``padding``, ``unknown``.
        template: Its chat template.
    """
    config = model.config
    arch = str(config.model_type)
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    rope = config.rope_parameters
    tokens, kinds = token_table(pipeline)
    metadata: dict[str, Any] = {
        "general.name": "Tiny",
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.freq_base": float(rope["rope_theta"]),
        f"{arch}.rope.dimension_count": head_dim,
        f"{arch}.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge)
            for merge in pipeline["model"]["merges"]
        ],
        "tokenizer.chat_template": template,
    }
    ids = {"bos": 1, "eos": 2, "padding": 2, "unknown": 0} if roles is None else roles
    metadata |= {f"tokenizer.ggml.{role}_token_id": i for role, i in ids.items()}
    metadata |= entries or {}
    writer = gguf.GGUFWriter(str(path), metadata.pop("general.architecture", arch))
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, values in _tensors(model, arch).items():
        _add_tensor(writer, name, values, kind if values.ndim > 1 else "F32")
    for name, values in (tensors or {}).items():
        _add_tensor(writer, name, values, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        assert isinstance(value, list)
        writer.add_array(key, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    form = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quantize(values, form), raw_dtype=form)


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
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        values = tensor.detach().to(torch.float32).numpy()
        projection = name.split(".")[-2]
        if arch == "llama" and projection in heads:
            values = _permuted(values, heads[projection])
        found[own] = np.ascontiguousarray(values)
    return found


def _permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows in which llama.cpp wants the rotary pairs of Llama."""
    half = weights.shape[0] // heads // 2
    rows = [
        head * 2 * half + part * half + i
        for head in range(heads)
        for i in range(half)
        for part in range(2)
    ]
    return weights[rows]
