"""Hashes of large models' weights, kept between loads.

Hashing 8 billion weights takes half a minute, loading them less. What was hashed is kept under
``$XDG_CACHE_HOME/umim/weights`` (``~/.cache``), by path, size and time of change of the files and
by the configuration. A record that is damaged, or does not fit the model, is as good as none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import transformers
from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel

from umim_core.backbone.model_identity import model_identity, weight_lines
from umim_core.errors import ArtifactError
from umim_core.store.artifacts import canonical_json, read_json, sha256_bytes, write_json
from umim_core.store.disk import user_cache

_SMALLEST: Final = 256 << 20  # bytes of weights; fewer are hashed in an instant


def weight_files(where: str, revision: str | None) -> list[Path]:
    """Return a model's files of weights, without asking the network."""
    folder = Path(where)
    if not folder.is_dir():
        config = try_to_load_from_cache(where, "config.json", revision=revision)
        if not isinstance(config, str):
            return []
        folder = Path(config).parent
    return sorted(folder.glob("*.safetensors"))


def cached_weight_lines(
    files: Sequence[Path], model: PreTrainedModel, published: Callable[[], PreTrainedModel]
) -> tuple[str, ...]:
    """Return ``weight_lines`` of a model as it was published.

    Args:
        files: Where its weights were read from.
        model: The model that was loaded from them, in any data type.
        published: Gives the model in a data type that holds its weights, if they must be hashed.

    Raises:
        BackboneError: If weights are packed into something other than tensors.
    """
    stats = [(str(path.absolute()), path.stat()) for path in files]
    if sum(stat.st_size for _, stat in stats) < _SMALLEST:
        return weight_lines(published())
    key = {
        "files": [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats],
        "config": dict(model_identity(model, ()).config),
        "transformers": transformers.__version__,
    }
    record = user_cache() / "weights" / f"{sha256_bytes(canonical_json(key).encode())}.json"
    known = _read(record, model)
    if known is not None:
        return known
    lines = weight_lines(published())
    with suppress(ArtifactError):  # a folder that cannot be written costs time only
        write_json(record, list(lines))
    return lines


def _read(record: Path, model: PreTrainedModel) -> tuple[str, ...] | None:
    """Return what a file says if it fits the model's tensors."""
    try:
        lines = read_json(record)
    except ArtifactError:
        return None
    shapes = [f"{name} {tuple(value.shape)} " for name, value in sorted(model.state_dict().items())]
    if not isinstance(lines, list) or len(lines) != len(shapes):
        return None
    for line, shape in zip(lines, shapes, strict=True):
        if not (isinstance(line, str) and re.fullmatch(re.escape(shape) + "[0-9a-f]{64}", line)):
            return None
    return tuple(lines)
