"""A tokenised corpus on disk: flat arrays of ids and of document ends, read through memory maps.

A folder holds a part for each file of the corpus, and an index of the parts in their order::

    00000.tokens.npy   int32   a b c d e f g    documents [a b c] [d e f g]
    00000.ends.npy     int64   3 7              the positions behind their last tokens
    index.json                 tokens, documents and the largest id of every part
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from umim_core.errors import ArtifactError, ConfigError, require
from umim_core.store.arrays import array_header, open_array, save_array
from umim_core.store.artifacts import described, read_json, write_json
from umim_core.store.disk import unwritable
from umim_core.store.scratch import scratch
from umim_core.text.token_ids import MAX_TOKEN_ID, TokenPiece, check_range

INDEX: Final = "index.json"
_TOKENS: Final = np.dtype("<i4")
_ENDS: Final = np.dtype("<i8")
_REBUILD: Final = "Build the artifact again."
_COPIED: Final = 1 << 20  # ids of a slice that are copied


class TokenPart(BaseModel):
    """Entry of the index; ``max_id`` is -1 without tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    number: int = Field(ge=0)
    tokens: int = Field(ge=0)
    documents: int = Field(ge=0)
    max_id: int = Field(ge=-1, le=MAX_TOKEN_ID)

    @property
    def files(self) -> tuple[str, str]:
        """Names of its ids and of its document ends."""
        return f"{self.number:05d}.tokens.npy", f"{self.number:05d}.ends.npy"

    def ids(self, directory: Path) -> NDArray[np.int32]:
        """Map its ids [tokens] (int32)."""
        return _mapped(directory / self.files[0], _TOKENS, self.tokens)

    def ends(self, directory: Path) -> NDArray[np.int64]:
        """Map the ends of its documents, from its own first token [documents] (int64)."""
        return _mapped(directory / self.files[1], _ENDS, self.documents)


class _Index(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["token-files"] = "token-files"
    schema_version: Literal[2] = 2
    parts: tuple[TokenPart, ...]


def write_part(
    directory: Path, pieces: Iterable[TokenPiece], number: int = 0, limit: int | None = None
) -> TokenPart:
    """Write the first ``limit`` tokens of one part, replacing it whole; its files are not indexed.

    Besides 8 bytes a document, a piece at a time is in memory. A document that is cut off ends with
    the part.
    """
    total, max_id, ends = 0, -1, array("q")
    path = directory / f"{number:05d}.tokens.npy"
    is_open = False
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with scratch(directory, path.name) as place, place.open("xb") as stream:
            stream.write(array_header(_TOKENS, (0,)))
            for ids, last in pieces:
                kept = ids if limit is None else ids[: limit - total]
                check_range(kept)
                if kept.size:
                    stream.write(np.ascontiguousarray(kept, _TOKENS).data)
                    total, max_id = total + kept.size, max(max_id, int(kept.max()))
                is_open = not last and (is_open or bool(kept.size))
                if last:
                    ends.append(total)
                if total == limit:
                    break
            if is_open:
                ends.append(total)
            stream.seek(0)
            stream.write(array_header(_TOKENS, (total,)))  # as long as that of no token
            stream.flush()
            place.replace(path)
    except OSError as error:
        raise unwritable(path, 4 * total, error) from error
    part = TokenPart(number=number, tokens=total, documents=len(ends), max_id=max_id)
    save_array(directory / part.files[1], np.array(ends, _ENDS))
    return part


def cut_part(directory: Path, part: TokenPart, tokens: int) -> TokenPart:
    """Cut a part down to its first tokens, as if it had been written with that limit."""
    ids, ends = part.ids(directory), part.ends(directory)
    borders = [0, *ends[: np.searchsorted(ends, tokens)].tolist(), tokens]
    return write_part(directory, ((ids[a:b], True) for a, b in pairwise(borders)), part.number)


def write_index(directory: Path, parts: Sequence[TokenPart]) -> None:
    """Write the index of all parts, in the order the corpus is read."""
    write_json(directory / INDEX, _Index(parts=tuple(parts)).model_dump(mode="json"))


def write_tokens(directory: Path, pieces: Iterable[TokenPiece]) -> TokenFiles:
    """Write a corpus of one part, and open it."""
    write_index(directory, [write_part(directory, pieces)])
    return TokenFiles.open(directory)


class TokenFiles:
    """A tokenised corpus: a sequence of int32 ids with document borders.

    Slices read no more than they ask for; threads and processes may share one object.
    """

    def __init__(self, directory: Path, parts: Sequence[TokenPart]) -> None:
        self.directory = directory
        self._parts = tuple(parts)
        self._starts = np.cumsum([0, *(part.tokens for part in parts)], dtype=np.int64)

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Read the index, and check that the files are there, of their types and sizes."""
        raw = read_json(directory / INDEX)
        with described(f"{directory / INDEX} must be an index of token files", _REBUILD):
            parts = _Index.model_validate(raw).parts
        numbers = [part.number for part in parts]
        require(
            all(before < after for before, after in pairwise(numbers)),
            ArtifactError,
            f"{directory / INDEX} must name its parts once and in order",
            numbers,
            _REBUILD,
        )
        for part in parts:
            part.ids(directory), part.ends(directory)
        return cls(directory, parts)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, key: slice) -> NDArray[np.int32]:
        """Return the ids of a range: a view of the file where many lie in one part."""
        start, stop, step = key.indices(len(self))
        require(step == 1, ConfigError, "token files are sliced without a step", step, "Slice it.")
        pieces: list[NDArray[np.int32]] = []
        # side="right" skips parts without tokens.
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            base, end = int(self._starts[number]), min(stop, int(self._starts[number + 1]))
            if start < end:
                pieces.append(self._read(self._parts[number], start - base, end - base))
                start = end
            number += 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate([np.zeros(0, _TOKENS), *pieces])

    @property
    def num_documents(self) -> int:
        return sum(part.documents for part in self._parts)

    @property
    def max_id(self) -> int:
        """The largest id; -1 for a corpus without tokens."""
        return max((part.max_id for part in self._parts), default=-1)

    def document_ends(self) -> NDArray[np.int64]:
        """Return the position after the last token of every document [num_documents] (int64)."""
        ends = [np.zeros(0, _ENDS)]
        for part, start in zip(self._parts, self._starts, strict=False):
            inside = part.ends(self.directory)
            bounds = np.concatenate([[0], inside, [part.tokens]])
            if (np.diff(bounds) < 0).any() or bounds[-2] != part.tokens:
                raise ArtifactError(
                    f"{self.directory / part.files[1]} must rise to {part.tokens}, the last token",
                    f"ends from {int(inside.min(initial=0))} to {int(inside.max(initial=0))}",
                    _REBUILD,
                )
            ends.append(start + inside)
        return np.concatenate(ends)

    def _read(self, part: TokenPart, start: int, stop: int) -> NDArray[np.int32]:
        ids = part.ids(self.directory)[start:stop]
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high > part.max_id:  # kernels index tables by them
            raise ArtifactError(
                f"{self.directory / part.files[0]} must hold ids in 0..{part.max_id}",
                f"ids from {low} to {high}",
                _REBUILD,
            )
        # A view keeps the file open; whoever keeps thousands of segments must not run out of files.
        return ids if ids.size > _COPIED else ids.copy()


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """Map a file that the index names, once it is as the index says."""
    array = open_array(path)
    require(
        (array.dtype, array.shape) == (dtype, (count,)),
        ArtifactError,
        f"{path} must hold {count} values of type {dtype.name}",
        f"{array.dtype.name} of shape {array.shape}",
        _REBUILD,
    )
    return array
