"""The files of token shards: names, index, sizes, and arrays without pickle."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from umim_core.errors import ArtifactError
from umim_core.store.arrays import array_header, open_array, save_array
from umim_core.store.artifacts import described, read_json, write_json
from umim_core.text.token_ids import MAX_TOKEN_ID

INDEX: Final = "index.json"
TOKENS: Final = np.dtype("<i4")
LENGTHS: Final = np.dtype("<i8")
REBUILD: Final = "Build the artifact again."
Number = TypeVar("Number", bound=np.generic)


class Shard(BaseModel):
    """Entry of the index for one shard.

    Attributes:
        documents: Documents that end in it.
        max_id: Largest id, -1 without tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    part: int = Field(ge=0)
    number: int = Field(ge=0)
    tokens: int = Field(ge=0)
    documents: int = Field(ge=0)
    max_id: int = Field(ge=-1, le=MAX_TOKEN_ID)

    @property
    def files(self) -> tuple[str, str]:
        """Names of its tokens file and its documents file."""
        stem = f"{self.part:05d}-{self.number:05d}"
        return f"{stem}.tokens.npy", f"{stem}.documents.npy"


class _Index(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["token-shards"] = "token-shards"
    schema_version: Literal[1] = 1
    shards: tuple[Shard, ...]


def write_shard(
    directory: Path, shard: Shard, ids: NDArray[np.int32], lengths: NDArray[np.integer]
) -> None:
    """Write the two files of a shard, replacing what is there."""
    tokens, documents = shard.files
    save_array(directory / tokens, np.ascontiguousarray(ids, TOKENS))
    save_array(directory / documents, np.ascontiguousarray(lengths, LENGTHS))


def write_index(directory: Path, shards: Sequence[Shard]) -> None:
    """Write the index of all parts, in the order the corpus is read."""
    write_json(directory / INDEX, _Index(shards=tuple(shards)).model_dump(mode="json"))


def first_tokens(directory: Path, shards: Sequence[Shard], count: int) -> list[Shard]:
    """Cut the shards of one part down to its first tokens, as if the writer had stopped there.

    The shard in which the cut falls is written again; the files of those behind it stay.
    """
    first: list[Shard] = []
    left = count
    for shard in shards:
        if shard.tokens < left:
            first.append(shard)
            left -= shard.tokens
            continue
        ids = np.array(mapped(directory / shard.files[0], TOKENS, shard.tokens)[:left])
        lengths = mapped(directory / shard.files[1], LENGTHS, shard.documents)
        ends = np.cumsum(lengths)
        ends = np.append(ends[: np.searchsorted(ends, left)], left)
        cut = shard.model_copy(
            update={"tokens": left, "documents": len(ends), "max_id": int(ids.max())}
        )
        write_shard(directory, cut, ids, np.diff(ends, prepend=0))
        return [*first, cut]
    return first


def read_index(directory: Path) -> tuple[Shard, ...]:
    """Read the index and check that the files are there in their sizes."""
    raw = read_json(directory / INDEX)
    with described(f"{directory / INDEX} must be an index of token shards", REBUILD):
        index = _Index.model_validate(raw)
    numbers = [(shard.part, shard.number) for shard in index.shards]
    if any(later <= earlier for earlier, later in pairwise(numbers)):
        raise ArtifactError(
            f"{directory / INDEX} must name its shards once and in order", numbers, REBUILD
        )
    for shard in index.shards:
        tokens, documents = shard.files
        _check_size(directory / tokens, TOKENS, shard.tokens)
        _check_size(directory / documents, LENGTHS, shard.documents)
    return index.shards


def _check_size(path: Path, dtype: np.dtype[Number], count: int) -> None:
    size = len(array_header(dtype, (count,))) + dtype.itemsize * count
    try:
        actual = path.stat().st_size
    except OSError as error:
        raise ArtifactError(
            f"{path} must exist, for the index names it", error.strerror or str(error), REBUILD
        ) from error
    if actual != size:
        raise ArtifactError(
            f"{path} must have {size} bytes", actual, "The file is torn. " + REBUILD
        )


def mapped(path: Path, dtype: np.dtype[Number], size: int) -> NDArray[Number]:
    """Map an array file of a known type and length."""
    if not size:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    array = open_array(path)
    if array.dtype != dtype or array.shape != (size,):
        raise ArtifactError(
            f"{path} must hold {size} values of type {dtype.name}",
            f"shape {array.shape}, dtype {array.dtype}",
            REBUILD,
        )
    return array
