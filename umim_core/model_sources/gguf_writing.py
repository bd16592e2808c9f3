"""GGUF file of a Hugging Face directory: what ``gguf_conversion`` reads, written.

Matrices keep their type, vectors become float32, as llama.cpp has them. Rows of the vocabulary
that no token has get unused tokens, so that llama.cpp counts as many tokens as rows. A file is read
again before it counts: what would come back otherwise is refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import BackboneError, require
from umim_core.model_sources.gguf_architectures import (
    ARCHITECTURES,
    ROPE_FACTORS,
    TensorPlan,
    llama3_divisors,
    llama_rows,
    model_config,
    tensor_plan,
    tensors_of,
)
from umim_core.model_sources.gguf_file import GgufFile, read_gguf
from umim_core.model_sources.gguf_tokenizer import (
    PRE_TOKENIZERS,
    ROLES,
    read_tokenizer,
    tokens_by_id,
)
from umim_core.store.disk import refusals_named

_NAMES: Final = ("gpt-2", "llama-bpe", "qwen2", "smollm", "dbrx")  # one of each pre-tokenizer
_FILE_TYPES: Final = {"F32": 0, "F16": 1, "BF16": 32}  # llama.cpp's numbers of them
_REMEDY: Final = "Export without GGUF, or convert the directory with llama.cpp's own script."


def write_gguf(directory: Path, out: Path, name: str) -> None:
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

    config = _config(directory)
    architecture = ARCHITECTURES[config["model_type"]]
    weights = _Weights(directory)
    writer = GGUFWriter(out, config["model_type"])
    writer.add_name(name)
    types = {  # as llama.cpp expects them
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.UINT32,
        float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
        list: GGUFValueType.ARRAY,
    }
    for key, value in _metadata(directory, config).items():
        writer.add_key_value(key, value, types[type(value)])
    writer.add_file_type(_FILE_TYPES[weights.kind("model.embed_tokens.weight")])
    plans = list(tensors_of(architecture, config))
    factors, rope = None, config["rope_parameters"]
    if rope.get("rope_type") == "llama3":
        divisors = llama3_divisors(rope["factor"], rope["rope_theta"], config["head_dim"])
        factors = divisors.astype(np.float32)
        writer.add_tensor_info(ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
    for plan in plans:
        kind = weights.kind(plan.target) if len(plan.shape) > 1 else "F32"
        size = math.prod(plan.shape) * (4 if kind == "F32" else 2)
        float32 = np.dtype(np.float32)  # not looked at beside the type of the file
        writer.add_tensor_info(plan.source, plan.shape, float32, size, GGMLQuantizationType[kind])
    try:
        with refusals_named(out):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            if factors is not None:
                writer.write_tensor_data(factors)
            for plan in plans:
                writer.write_tensor_data(weights.values(plan))
    finally:
        writer.close()
    _check(read_gguf(out), config, directory)


def _config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    family, window = config.get("model_type"), config.get("sliding_window")
    rule = f"a GGUF file is written of the architectures {', '.join(ARCHITECTURES)}"
    require(family in ARCHITECTURES, BackboneError, rule, family, _REMEDY)
    layers = config.get("layer_types")
    full = set(layers) == {"full_attention"} if layers else window is None
    require(full, BackboneError, "a GGUF file is written of full attention", window, _REMEDY)
    heads = config["num_attention_heads"]
    sized = {"head_dim": config["hidden_size"] // heads, "num_key_value_heads": heads}
    return config | {key: config.get(key) or value for key, value in sized.items()}


def _metadata(directory: Path, config: Mapping[str, Any]) -> dict[str, object]:
    arch = config["model_type"]
    rope = config["rope_parameters"]
    sizes = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": config["head_dim"],
        "vocab_size": config["vocab_size"],
    }
    if rope.get("rope_type") == "linear":
        sizes |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    entries: dict[str, object] = {f"{arch}.{key}": value for key, value in sizes.items()}
    return entries | _tokenizer(directory, config["vocab_size"])


def _tokenizer(directory: Path, rows: int) -> dict[str, object]:
    pipeline = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    kind = pipeline["model"]["type"]
    rule = "a GGUF file is written of byte-level BPE"
    require(kind == "BPE", BackboneError, rule, kind, _REMEDY)
    settings = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    vocabulary, merges = _vocabulary(pipeline)
    tokens, kinds = tokens_by_id(vocabulary, pipeline["added_tokens"], rows)
    ids = {token: i for i, token in enumerate(tokens)}
    entries: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre_tokenizer(pipeline),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
    }
    for role, name in ROLES.items():
        token = settings.get(f"{role}_token")
        content = token.get("content") if isinstance(token, dict) else token
        if content is not None:
            entries[f"tokenizer.ggml.{name}_token_id"] = ids[content]
    around = _around(pipeline)
    entries["tokenizer.ggml.add_bos_token"] = around[:1] == ["SpecialToken"]
    entries["tokenizer.ggml.add_eos_token"] = around[-1:] == ["SpecialToken"]
    template = directory / "chat_template.jinja"
    if template.exists():
        entries["tokenizer.chat_template"] = template.read_text(encoding="utf-8")
    elif isinstance(settings.get("chat_template"), str):
        entries["tokenizer.chat_template"] = settings["chat_template"]
    return entries


def _around(pipeline: Mapping[str, Any]) -> list[str]:
    """Return the kinds of a template's parts around one text; none without a template."""
    processor = pipeline.get("post_processor") or {}
    parts = processor.get("processors", [processor])
    single = [part["single"] for part in parts if part.get("type") == "TemplateProcessing"]
    return [next(iter(entry)) for entry in single[0]] if single else []


def _pre_tokenizer(pipeline: Mapping[str, Any]) -> str:
    """Return the name in llama.cpp of a tokenizer's normaliser and pre-tokenizer."""
    parts = (
        _bare(pipeline["pre_tokenizer"]),
        _bare(pipeline.get("normalizer")),
        bool(pipeline["model"].get("ignore_merges")),
    )
    for name in _NAMES:
        known = PRE_TOKENIZERS[name]
        pieces, normalizer = map(_described, (known.pieces, known.normalizer))
        if parts == (_bare(pieces), _bare(normalizer), known.ignore_merges):
            return name
    rule = f"a GGUF file is written of tokenizers that split as one of {', '.join(_NAMES)}"
    raise BackboneError(rule, json.dumps(pipeline["pre_tokenizer"]), _REMEDY)


def _described(part: Any) -> Any:
    """Return a part of a tokenizer as ``tokenizer.json`` has it."""
    return part if part is None else json.loads(part.__getstate__())


def _bare(part: Any) -> Any:
    """Return a part of a tokenizer without what decides offsets alone."""
    if isinstance(part, Mapping):
        return {key: _bare(value) for key, value in part.items() if key != "trim_offsets"}
    return [_bare(entry) for entry in part] if isinstance(part, list) else part


class _Weights:
    def __init__(self, directory: Path) -> None:
        from safetensors import safe_open

        paths = sorted(directory.glob("*.safetensors"))
        files: list[Any] = [safe_open(path, framework="pt") for path in paths]
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def kind(self, name: str) -> str:
        rule = "the weights must hold every tensor of the model"
        require(name in self._files, BackboneError, rule, f"no {name}", _REMEDY)
        kind = str(self._files[name].get_slice(name).get_dtype())
        rule = f"weights must be of the types {', '.join(_FILE_TYPES)}"
        require(kind in _FILE_TYPES, BackboneError, rule, kind, _REMEDY)
        return kind

    def values(self, plan: TensorPlan) -> NDArray[Any]:
        """Return a tensor's numbers as they stand in the file; bfloat16 as integers."""
        import torch

        tensor = self._files[plan.target].get_tensor(plan.target)
        if tensor.ndim == 1:
            tensor = tensor.to(torch.float32)
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.view(torch.int16)
        values = tensor.numpy()
        return np.ascontiguousarray(llama_rows(values, plan.heads) if plan.heads else values)


def _check(file: GgufFile, config: Mapping[str, Any], directory: Path) -> None:
    written = model_config(file)
    tensor_plan(file, written)
    ignored = {"dtype", "architectures", "use_cache", "vocab_size"}
    for key, value in written.items():
        given = config.get(key, value)
        if key == "rope_parameters":
            given = {name: given.get(name) for name in value}
            given |= {"rope_theta": float(given["rope_theta"])}
        rule = f"{key} must be {value!r} in a model for a GGUF file"
        require(key in ignored or given == value, BackboneError, rule, given, _REMEDY)
    pipeline = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    back = _vocabulary(read_tokenizer(file).pipeline) == _vocabulary(pipeline)
    rule = "a tokenizer's tokens and merges must come back"
    require(back, BackboneError, rule, "others", _REMEDY)


def _vocabulary(pipeline: Mapping[str, Any]) -> tuple[dict[str, int], list[list[str]]]:
    """Return a tokenizer's ids by token, added ones among them, and its merges."""
    added = {token["content"]: token["id"] for token in pipeline["added_tokens"]}
    merges = [m.split(" ") if isinstance(m, str) else m for m in pipeline["model"]["merges"]]
    return pipeline["model"]["vocab"] | added, merges
