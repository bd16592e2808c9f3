"""Cache of converted GGUF files: one conversion per content, shared by processes.

::

    $UMIM_MODELS/gguf-DIGEST/      DIGEST: the first digits of the file's SHA-256
      config.json model.safetensors tokenizer.json ... quantisation.json README.md manifest.json

The file is hashed once per process and change; a converted model that was changed since it was
written is made again.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Final

from umim_core.errors import ArtifactError, BackboneError
from umim_core.packages.gguf_conversion import convert_gguf, quantisation
from umim_core.packages.gguf_file import MAGIC, read_gguf
from umim_core.packages.model_cache import locked, models_root, require_room, whole_record
from umim_core.store.artifacts import sha256_file, write_manifest
from umim_core.store.publication import publish_directory

GGUF: Final = ".gguf"
_KIND: Final = "gguf-model"
_SCHEMA: Final = 1  # a conversion that writes other files counts it up: all are made again
_BYTES_PER_WEIGHT: Final = 4
_log: Final = logging.getLogger("umim")


def is_gguf(name: str) -> bool:
    """Return whether a name is that of a GGUF file: by its ending, else by its first letters."""
    if not os.path.isfile(name):
        return False
    if name.endswith(GGUF):
        return True
    with open(name, "rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def gguf_directory(path: Path) -> Path:
    """Return the directory of a GGUF file's model, converted now if it was not before.

    Raises:
        BackboneError: As in ``convert_gguf``, and if the file changes meanwhile.
        ArtifactError: If the cache cannot be written.
    """
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
