"""The user's cache of what can be made again, and the values that are remembered there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from umim_core.errors import ArtifactError
from umim_core.store.artifacts import sha256_bytes
from umim_core.store.disk import read_bytes, write_bytes

T = TypeVar("T")
SHA256: Final = TypeAdapter(Annotated[str, Field(pattern="^[0-9a-f]{64}$")])
_MOST_BYTES: Final = 1 << 26  # of a value


def user_cache() -> Path:
    """Return the user's folder for what can be made again: ``$XDG_CACHE_HOME/umim``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "umim"


def remembered(folder: str, key: object, kind: TypeAdapter[T], make: Callable[[], T]) -> T:
    """Return what a folder of the user's cache records under a key, else make and record it.

    The key is everything that the value depends on, as JSON. What is not of the kind is damaged,
    and made again.
    """
    text = json.dumps(key, sort_keys=True, separators=(",", ":"))  # of paths that are no UTF-8, too
    record = user_cache() / folder / f"{sha256_bytes(text.encode())}.json"
    with suppress(OSError, ValidationError):
        return kind.validate_json(read_bytes(record, _MOST_BYTES))
    value = make()
    with suppress(ArtifactError):  # a folder that cannot be written costs time only
        write_bytes(record, kind.dump_json(value))
    return value
