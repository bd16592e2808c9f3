"""GGUF files as Hugging Face directories: configuration, tokenizer, weights as float32."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Final

import numpy as np

from umim_core.model_sources.gguf_architectures import (
    TensorPlan,
    hugging_face_rows,
    model_config,
    tensor_plan,
)
from umim_core.model_sources.gguf_file import GgufFile, read_gguf
from umim_core.model_sources.gguf_tokenizer import read_tokenizer
from umim_core.store.artifacts import read_json
from umim_core.store.disk import unwritable, write_bytes

_QUANTISATION: Final = "quantisation.json"
_EXACT: Final = frozenset({"F32", "F16", "BF16"})  # types that hold published weights as they are


def convert_gguf(source: Path, out: Path) -> None:
    """Write a GGUF file's model as a Hugging Face directory in single precision.

    Memory stays at a few copies of the largest tensor.
    """
    file = read_gguf(source)
    config = model_config(file)
    plans = tensor_plan(file, config)
    tokenizer = read_tokenizer(file)
    stops = tokenizer.stops
    ends = {"eos_token_id": stops[0] if len(stops) == 1 else stops} if stops else {}
    _write(out / "config.json", config | tokenizer.roles)
    _write(out / "generation_config.json", tokenizer.roles | ends)
    _write(out / "tokenizer.json", tokenizer.pipeline)
    _write(out / "tokenizer_config.json", tokenizer.settings)
    if tokenizer.chat_template:
        write_bytes(out / "chat_template.jinja", tokenizer.chat_template.encode())
    types = Counter[str]()
    for tensor in file.tensors.values():
        types[tensor.kind] += int(np.prod(tensor.shape))
    _write(out / _QUANTISATION, dict(sorted(types.items())))
    _write_weights(out / "model.safetensors", file, plans)


def quantisation(directory: Path) -> str:
    """Say in which types the GGUF file of a converted model held its weights.

    Returns:
        "Q4_1 79 %, Q8_0 21 %", the shares of all weights; "" if none was quantised, or the
        directory is not one that ``convert_gguf`` wrote.
    """
    path = directory / _QUANTISATION
    weights = read_json(path) if path.is_file() else None
    if not isinstance(weights, dict) or not weights.keys() - _EXACT:
        return ""
    total = sum(weights.values())
    shares = sorted(((count / total, kind) for kind, count in weights.items()), reverse=True)
    return ", ".join(f"{kind} {share:.0%}" for share, kind in shares if share >= 0.005)


def _write(path: Path, value: object) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    write_bytes(path, (text + "\n").encode())


def _write_weights(path: Path, file: GgufFile, plans: list[TensorPlan]) -> None:
    """Write the tensors in the safetensors format, one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for plan in plans:
        start, end = end, end + 4 * int(np.prod(plan.shape))
        header[plan.target] = {
            "dtype": "F32",
            "shape": list(plan.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data start at a multiple of 8 bytes
    try:
        with path.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for plan in plans:
                values = file.tensors[plan.source].values()
                if plan.heads:
                    values = np.ascontiguousarray(hugging_face_rows(values, plan.heads))
                stream.write(values.astype("<f4", copy=False).data)
    except OSError as error:
        raise unwritable(path, end, error) from error
