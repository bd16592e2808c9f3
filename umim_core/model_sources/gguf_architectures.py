"""Llama-like architectures of GGUF files: Hugging Face's configuration and names of tensors.

Every entry and every tensor of a file is either used or known to change nothing; what is neither is
refused by name, since a model that ignores it would compute something else.

Shapes: d embedding size, f feed-forward size, h heads, k heads of keys, s size of a head,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import BackboneError, require
from umim_core.model_sources.gguf_file import DAMAGED, DIRECTORY_INSTEAD, GgufFile

_LAYER: Final = {
    "attn_norm.weight": ("input_layernorm.weight", ("d",)),
    "ffn_norm.weight": ("post_attention_layernorm.weight", ("d",)),
    "attn_output.weight": ("self_attn.o_proj.weight", ("d", "hs")),
    "ffn_down.weight": ("mlp.down_proj.weight", ("d", "f")),
}
_ATTENTION: Final = {
    "attn_q.weight": ("self_attn.q_proj.weight", ("hs", "d")),
    "attn_k.weight": ("self_attn.k_proj.weight", ("ks", "d")),
    "attn_v.weight": ("self_attn.v_proj.weight", ("ks", "d")),
}
_GATED: Final = {
    "ffn_gate.weight": ("mlp.gate_proj.weight", ("f", "d")),
    "ffn_up.weight": ("mlp.up_proj.weight", ("f", "d")),
}
_BIASES: Final = {
    "attn_q.bias": ("self_attn.q_proj.bias", ("hs",)),
    "attn_k.bias": ("self_attn.k_proj.bias", ("ks",)),
    "attn_v.bias": ("self_attn.v_proj.bias", ("ks",)),
}
_HEAD_NORMS: Final = {
    "attn_q_norm.weight": ("self_attn.q_norm.weight", ("s",)),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", ("s",)),
}
_FUSED: Final = {
    "attn_qkv.weight": ("self_attn.qkv_proj.weight", ("hs+2ks", "d")),
    "ffn_up.weight": ("mlp.gate_up_proj.weight", ("2f", "d")),
}


@dataclass(frozen=True)
class Architecture:
    """Names of a family in GGUF files, and those of Hugging Face's directories for the same.

    Attributes:
        layer: Tensors of a layer: the name in the file, the name there, and the shape.
        interleaved: Whether the rows of queries and keys stand in llama.cpp's order of rotary
            pairs and must be put back.
        settings: Fields of the configuration that every model of the family has.
    """

    model_type: str
    model_class: str
    layer: Mapping[str, tuple[str, tuple[str, ...]]]
    interleaved: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)


ARCHITECTURES: Final = {
    "llama": Architecture(
        "llama",
        "LlamaForCausalLM",
        {**_LAYER, **_ATTENTION, **_GATED},
        interleaved=True,
        settings={"attention_bias": False, "mlp_bias": False},
    ),
    "qwen2": Architecture(
        "qwen2", "Qwen2ForCausalLM", {**_LAYER, **_ATTENTION, **_GATED, **_BIASES}
    ),
    "qwen3": Architecture(
        "qwen3",
        "Qwen3ForCausalLM",
        {**_LAYER, **_ATTENTION, **_GATED, **_HEAD_NORMS},
        settings={"attention_bias": False},
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", {**_LAYER, **_FUSED}),
}
# Entries of a family that are read below, or say nothing about what the model computes.
_KNOWN: Final = {
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window", "attention.value_length",
    "block_count", "context_length", "embedding_length", "expert_count", "expert_used_count",
    "feed_forward_length", "rope.dimension_count", "rope.freq_base", "rope.scaling.factor",
    "rope.scaling.finetuned", "rope.scaling.original_context_length", "rope.scaling.type",
    "tensor_data_layout", "vocab_size",
}  # fmt: skip
ROPE_FACTORS: Final = "rope_freqs.weight"
# Llama 3.1 to 3.3 stretch low frequencies by one factor; the other numbers are the same in all.
_LLAMA3: Final = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def architecture_of(file: GgufFile) -> Architecture:
    name = file.text("general.architecture")
    rule = f"a GGUF file must hold a model of the architectures {', '.join(ARCHITECTURES)}"
    found = f"{file.path} holds {name!r}"
    require(name in ARCHITECTURES, BackboneError, rule, found, DIRECTORY_INSTEAD)
    parts = file.integer("split.count", 1)
    rule = "a GGUF file must hold a whole model"
    remedy = "Join them with llama.cpp's llama-gguf-split --merge."
    require(parts <= 1, BackboneError, rule, f"{file.path} is one of {parts} parts", remedy)
    return ARCHITECTURES[name]


def model_config(file: GgufFile) -> dict[str, Any]:
    """Return the configuration of a GGUF file's model, as ``config.json`` holds it."""
    architecture = architecture_of(file)
    prefix = f"{file.text('general.architecture')}."
    keys = {key.removeprefix(prefix) for key in file.metadata if key.startswith(prefix)}
    if strange := sorted(keys - _KNOWN):
        unsupported(f"{prefix}{strange[0]}", file.metadata[prefix + strange[0]])
    for name in ("expert_count", "attention.sliding_window"):
        if file.integer(prefix + name, 0):
            unsupported(prefix + name, file.metadata[prefix + name])
    hidden = file.size(prefix + "embedding_length")
    heads = file.size(prefix + "attention.head_count")
    key_heads = file.size(prefix + "attention.head_count_kv", heads)
    sized = prefix + "attention.key_length" in file.metadata
    fits = heads % key_heads == 0 and (sized or hidden % heads == 0)
    rule = f"{prefix}embedding_length must be divisible by the heads, they by the heads of keys"
    require(fits, BackboneError, rule, f"{hidden}, {heads} and {key_heads}", DAMAGED)
    head_dim = file.size(prefix + "attention.key_length", hidden // heads)
    rule = "heads of a GGUF file's model must be of an even size, for rotary positions"
    require(head_dim % 2 == 0, BackboneError, rule, head_dim, DAMAGED)
    for name in ("attention.value_length", "rope.dimension_count"):
        if file.integer(prefix + name, head_dim) != head_dim:
            unsupported(prefix + name, f"{file.metadata[prefix + name]} for heads of {head_dim}")
    tokens = len(file.texts("tokenizer.ggml.tokens"))
    embeddings = file.tensors.get("token_embd.weight")
    config: dict[str, Any] = {
        "architectures": [architecture.model_class],
        "dtype": "float32",
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": file.size(prefix + "feed_forward_length"),
        "max_position_embeddings": file.size(prefix + "context_length"),
        "model_type": architecture.model_type,
        "num_attention_heads": heads,
        "num_hidden_layers": file.size(prefix + "block_count"),
        "num_key_value_heads": key_heads,
        "rms_norm_eps": file.positive(prefix + "attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, prefix, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "use_cache": True,
        "vocab_size": tokens if embeddings is None else embeddings.shape[0],
        **architecture.settings,
    }
    rows = config["vocab_size"]
    rule = "a GGUF file must have an embedding for every token"
    require(rows >= tokens, BackboneError, rule, f"{rows} for {tokens}", DAMAGED)
    return config


def _rope(file: GgufFile, prefix: str, head_dim: int) -> dict[str, object]:
    """Return the rotary positions, as ``rope_parameters`` of a configuration holds them."""
    theta = file.positive(prefix + "rope.freq_base", 10000.0)
    base: dict[str, object] = {"rope_theta": theta}
    kind = file.text(prefix + "rope.scaling.type", "none")
    factors = file.tensors.get(ROPE_FACTORS)
    if factors is not None and kind == "none":
        return base | _llama3_scaling(factors.values(), theta, head_dim)
    if kind == "none":
        return base | {"rope_type": "default"}
    if kind == "linear" and factors is None:
        factor = file.positive(prefix + "rope.scaling.factor")
        return base | {"rope_type": "linear", "factor": factor}
    unsupported(prefix + "rope.scaling.type", kind)


def _llama3_scaling(factors: NDArray[np.float32], theta: float, head_dim: int) -> dict[str, object]:
    factor = float(factors.max())
    expected = llama3_divisors(factor, theta, head_dim)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        unsupported(ROPE_FACTORS, "divisors of rotary frequencies other than Llama 3's")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def llama3_divisors(factor: float, theta: float, head_dim: int) -> NDArray[np.float64]:
    """Return Llama 3's divisors [head_dim / 2] of the rotary frequencies."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    waves = 2 * np.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = _LLAMA3["original_max_position_embeddings"] / waves
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))


def unsupported(what: str, value: object) -> NoReturn:
    rule = f"{what} of a GGUF file must be something that this version can convert exactly"
    raise BackboneError(rule, value, DIRECTORY_INSTEAD)


@dataclass(frozen=True)
class TensorPlan:
    """A tensor to be written.

    Attributes:
        target: Its name in Hugging Face's form.
        source: Its name in the GGUF file.
        heads: Heads whose rows must be put back from llama.cpp's order; 0 if they stand right.
    """

    target: str
    source: str
    shape: tuple[int, ...]
    heads: int = 0


def tensors_of(architecture: Architecture, config: Mapping[str, Any]) -> Iterator[TensorPlan]:
    d, f, s = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    hs, ks = heads * s, keys * s
    sizes = {"d": d, "f": f, "s": s, "hs": hs, "ks": ks, "hs+2ks": hs + 2 * ks, "2f": 2 * f}
    table = (config["vocab_size"], d)
    yield TensorPlan("model.embed_tokens.weight", "token_embd.weight", table)
    yield TensorPlan("model.norm.weight", "output_norm.weight", (d,))
    if not config["tie_word_embeddings"]:
        yield TensorPlan("lm_head.weight", "output.weight", table)
    turned = {"attn_q.weight": heads, "attn_k.weight": keys} if architecture.interleaved else {}
    for layer in range(config["num_hidden_layers"]):
        for source, (target, shape) in architecture.layer.items():
            sized = tuple(sizes[letter] for letter in shape)
            yield TensorPlan(
                f"model.layers.{layer}.{target}",
                f"blk.{layer}.{source}",
                sized,
                turned.get(source, 0),
            )


def tensor_plan(file: GgufFile, config: Mapping[str, Any]) -> list[TensorPlan]:
    """Return the tensors to write, by name; the file's are checked to be exactly those."""
    plans = []
    for plan in tensors_of(architecture_of(file), config):
        rule = "a GGUF file must hold every tensor of its model"
        lack = f"{file.path} lacks {plan.source}"
        # before the next ones, however many the file claims
        require(plan.source in file.tensors, BackboneError, rule, lack)
        shape = file.tensors[plan.source].shape
        rule = f"{plan.source} of this GGUF file must have the sizes {plan.shape}"
        remedy = "The file is damaged, or its model is not one of its architecture."
        require(shape == plan.shape, BackboneError, rule, shape, remedy)
        plans.append(plan)
    used = {plan.source for plan in plans} | {ROPE_FACTORS}
    if strange := [name for name in file.tensors if name not in used]:
        unsupported(f"the tensor {strange[0]}", file.tensors[strange[0]].shape)
    return sorted(plans, key=lambda plan: plan.target)


def hugging_face_rows(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Put the rows of a query or key projection back from llama.cpp's order.

    Rotary pairs stand next to each other there and half a head apart here::

        a head of 6 rows, in the file   0 3 1 4 2 5
        returned                        0 1 2 3 4 5

    The projection is [heads * s, d].
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def llama_rows(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Put the rows of a projection into llama.cpp's order; see ``hugging_face_rows``."""
    pairs = weight.reshape(heads, 2, -1, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
