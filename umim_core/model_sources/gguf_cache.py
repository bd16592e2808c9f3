"""Cache of converted GGUF files: one conversion per content, shared by processes.

::

    $UMIM_MODELS/gguf-DIGEST/      DIGEST: the first digits of the file's SHA-256
      config.json model.safetensors tokenizer.json ... quantisation.json README.md manifest.json

The file is hashed once per process and change; a converted model that was changed since it was
written is made again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from umim_core.errors import ArtifactError, BackboneError
from umim_core.model_sources.gguf_architectures import (
    TensorPlan,
    hugging_face_rows,
    model_config,
    tensor_plan,
)
from umim_core.model_sources.gguf_file import MAGIC, GgufFile, read_gguf
from umim_core.model_sources.gguf_tokenizer import read_tokenizer
from umim_core.model_sources.model_cache import locked, models_root, require_room, whole_record
from umim_core.store.artifacts import read_json, sha256_file, write_manifest
from umim_core.store.disk import unwritable, write_bytes
from umim_core.store.publication import publish_directory

GGUF: Final = ".gguf"
_KIND: Final = "gguf-model"
_SCHEMA: Final = 1  # a conversion that writes other files counts it up: all are made again
_BYTES_PER_WEIGHT: Final = 4
_log: Final = logging.getLogger("umim")
QUANTISATION: Final = "quantisation.json"
_EXACT: Final = frozenset({"F32", "F16", "BF16"})  # types that hold published weights as they are


def convert_gguf(source: Path, out: Path) -> None:
    """Write a GGUF file's model as a Hugging Face directory in single precision.

    Memory stays at a few copies of the largest tensor.
    """
    file = read_gguf(source)
    config = model_config(file)
    plans = tensor_plan(file, config)
    tokenizer = read_tokenizer(file)
    stops: int | list[int] = list(tokenizer.stops)
    if len(tokenizer.stops) == 1:
        stops = tokenizer.stops[0]
    generation = {**tokenizer.roles, **({"eos_token_id": stops} if tokenizer.stops else {})}
    _write(out / "config.json", config | tokenizer.roles)
    _write(out / "generation_config.json", generation)
    _write(out / "tokenizer.json", tokenizer.pipeline)
    _write(out / "tokenizer_config.json", tokenizer.settings)
    if tokenizer.chat_template:
        write_bytes(out / "chat_template.jinja", tokenizer.chat_template.encode())
    _write(out / QUANTISATION, _types(file))
    _write_weights(out / "model.safetensors", file, plans)


def quantisation(directory: Path) -> str:
    """Say in which types the GGUF file of a converted model held its weights.

    Returns:
        "Q4_1 79 %, Q8_0 21 %", the shares of all weights; "" if none was quantised, or the
        directory is not one that ``convert_gguf`` wrote.
    """
    path = directory / QUANTISATION
    weights = read_json(path) if path.is_file() else None
    if not isinstance(weights, dict) or not weights.keys() - _EXACT:
        return ""
    total = sum(weights.values())
    shares = sorted(((count / total, kind) for kind, count in weights.items()), reverse=True)
    return ", ".join(f"{kind} {share:.0%}" for share, kind in shares if share >= 0.005)


def _types(file: GgufFile) -> dict[str, int]:
    """Return how many weights a file holds in each type."""
    counts: Counter[str] = Counter()
    for tensor in file.tensors.values():
        counts[tensor.kind] += int(np.prod(tensor.shape))
    return dict(sorted(counts.items()))


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


def is_gguf(name: str) -> bool:
    """Return whether a name is that of a GGUF file: by its ending, else by its first letters."""
    if not os.path.isfile(name):
        return False
    if name.endswith(GGUF):
        return True
    with open(name, "rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def find_gguf(name: str) -> Path | None:
    """Return the GGUF file of a name: a path, or a file of the models folder; None for neither."""
    if is_gguf(name):
        return Path(name)
    stored = models_root() / name
    return stored if is_bare(name) and stored.is_file() else None


def is_bare(name: str) -> bool:
    """Return whether a name is that of a GGUF file without its folder."""
    return name.endswith(GGUF) and Path(name).name == name


def gguf_directory(path: Path) -> Path:
    """Return the directory of a GGUF file's model, converted now if it was not before."""
    digest = _digest_of(path)
    final = models_root() / f"gguf-{digest[:16]}"
    if _is_whole(final):
        return final
    with locked(final, "convert", "converted"):
        if not _is_whole(final):
            _convert(path, digest, final)
    return final


def _is_whole(final: Path) -> bool:
    """Return whether a converted model is there as it was written; say so if it is damaged."""
    if not final.is_dir():
        return False
    try:
        whole_record(final, kind=_KIND, schema=_SCHEMA)
    except (ArtifactError, OSError) as error:
        _log.warning("umim: %s is damaged and will be made again: %s", final, error)
        return False
    return True


def _convert(path: Path, digest: str, final: Path) -> None:
    """Convert and publish under the lock."""
    weights = sum(math.prod(tensor.shape) for tensor in read_gguf(path).tensors.values())
    needed = weights * _BYTES_PER_WEIGHT
    require_room(final.parent, needed, path.name)
    _log.warning(
        "umim: converting %s to float32, once: %s MB -> %s", path, f"{needed / 1e6:,.0f}", final
    )
    shutil.rmtree(final, ignore_errors=True)
    publish_directory(final, lambda out: _fill(path, digest, out))


def _fill(path: Path, digest: str, out: Path) -> None:
    convert_gguf(path, out)
    _digest.cache_clear()
    if (now := _digest_of(path)) != digest:
        raise BackboneError(
            f"{path} must stay as it is while it is converted (SHA-256 {digest})",
            now,
            "Try again once it is written.",
        )
    held = quantisation(out)
    lost = "What quantisation lost is not restored, so figures of the base model are those of these"
    (out / "README.md").write_text(
        f"# {path.stem}\n\nMade from a GGUF file (SHA-256 `{digest}`): its weights as "
        f"float32.\n" + (f"The file held them as {held}. {lost} weights.\n" if held else ""),
        encoding="utf-8",
    )
    write_manifest(out, kind=_KIND, schema=_SCHEMA, body={"sha256": digest})


def _digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, hashed again when it changed."""
    try:
        status = path.stat()
        return _digest(str(path.resolve()), status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise BackboneError(
            "a GGUF file must be readable", f"{path}: {error.strerror}", "Check the path."
        ) from error


@lru_cache
def _digest(path: str, size: int, changed: int) -> str:
    return sha256_file(Path(path))
