"""Token shards: a tokenised corpus on disk, with document borders, read through memory maps.

A directory holds ``index.json`` and per shard ``NNNNN-NNNNN.tokens.npy`` (int32) and
``NNNNN-NNNNN.documents.npy`` (int64). The first number is the part (the file of the corpus), the
second the shard in it. A document may run over shards of its part; each shard stores the lengths of
the documents that end in it, counted from its own start::

    tokens     a b c d | e f g h     3 tokens, then 4, then 1
    documents  3       | 3 1
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import ArtifactError, ConfigError
from umim_core.store.disk import unwritable
from umim_core.text.shard_files import (
    LENGTHS,
    REBUILD,
    TOKENS,
    Shard,
    mapped,
    read_index,
    write_index,
    write_shard,
)
from umim_core.text.token_ids import check_range

SHARD_TOKENS: Final = 1 << 24
_OPEN_SHARDS: Final = 16  # memory maps kept; a process may hold some 65,000
# Reading the header of an array parses Python, which 3.11 cannot do in two threads at once.
_OPENING: Final = Lock()


class ShardWriter:
    """Write one part of a corpus; takes ``4 * shard_tokens`` bytes of memory."""

    def __init__(self, directory: Path, shard_tokens: int = SHARD_TOKENS, part: int = 0) -> None:
        if shard_tokens < 1:
            raise ConfigError("shard_tokens must be at least 1", shard_tokens)
        self._directory, self._part = directory, part
        self._buffer = np.empty(shard_tokens, np.int32)
        self._filled = 0
        self._open = False  # whether a document has begun and not ended
        self._ends: list[int] = []
        self._shards: list[Shard] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(directory, 0, error) from error

    def add(self, ids: NDArray[np.integer]) -> None:
        """Add a piece of the current document."""
        if not ids.size:
            return
        check_range(ids)
        self._open = True
        done = 0
        while done < ids.size:
            # A full shard waits for its successor: its last document may end right here.
            if self._filled == self._buffer.size:
                self._flush()
            take = min(ids.size - done, self._buffer.size - self._filled)
            self._buffer[self._filled : self._filled + take] = ids[done : done + take]
            self._filled += take
            done += take

    def end_document(self) -> None:
        """End the current document, which may be empty."""
        self._ends.append(self._filled)
        self._open = False

    def finish(self) -> list[Shard]:
        """Write what is left, end an open document, and return the part's shards."""
        if self._open:
            self.end_document()
        if self._filled or self._ends:
            self._flush()
        return self._shards

    def close(self) -> None:
        """Finish a corpus of this one part: write its index."""
        write_index(self._directory, self.finish())

    def _flush(self) -> None:
        ids = self._buffer[: self._filled]
        shard = Shard(
            part=self._part,
            number=len(self._shards),
            tokens=self._filled,
            documents=len(self._ends),
            max_id=int(ids.max()) if self._filled else -1,
        )
        write_shard(self._directory, shard, ids, np.diff(self._ends, prepend=0))
        self._shards.append(shard)
        self._filled, self._ends = 0, []


class TokenShards:
    """A tokenised corpus: a sequence of int32 ids with document borders.

    Made by :meth:`open`. Slices read no more than they ask for; threads may share one object.
    """

    def __init__(self, directory: Path, shards: Sequence[Shard]) -> None:
        self.directory = directory
        self._shards = tuple(shards)
        self._starts = np.cumsum([0, *(shard.tokens for shard in shards)], dtype=np.int64)
        self._maps: OrderedDict[int, NDArray[np.int32]] = OrderedDict()

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Open what a writer closed; reads the index and the sizes of the files."""
        return cls(directory, read_index(directory))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, key: slice) -> NDArray[np.int32]:
        """Return the ids of a range."""
        start, stop, step = key.indices(len(self))
        if step != 1:
            raise ConfigError("token shards are sliced without a step", step, "Slice the result.")
        parts: list[NDArray[np.int32]] = []
        # side="right" skips shards without tokens.
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            base, end = int(self._starts[number]), min(stop, int(self._starts[number + 1]))
            if start < end:
                parts.append(self._read(number, start - base, end - base))
                start = end
            number += 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([np.zeros(0, np.int32), *parts])

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return sum(shard.documents for shard in self._shards)

    @property
    def max_id(self) -> int:
        """The largest id; -1 for a corpus without tokens."""
        return max((shard.max_id for shard in self._shards), default=-1)

    def document_ends(self) -> NDArray[np.int64]:
        """Return the position after the last token of every document [num_documents] (int64)."""
        ends_by_shard = [np.zeros(0, np.int64)]
        for number, shard in enumerate(self._shards):
            with _OPENING:
                lengths = mapped(self.directory / shard.files[1], LENGTHS, shard.documents)
            if (lengths < 0).any() or int(lengths.sum()) > shard.tokens:
                raise ArtifactError(
                    f"{self.directory / shard.files[1]} must divide {shard.tokens} tokens",
                    f"lengths from {int(lengths.min())}, {int(lengths.sum())} in all",
                    REBUILD,
                )
            ends_by_shard.append(self._starts[number] + np.cumsum(lengths))
        ends = np.concatenate(ends_by_shard)
        if len(self) and (not ends.size or int(ends[-1]) != len(self)):
            raise ArtifactError(
                "the last document must end with the last token",
                f"{ends[-1:].tolist()} of {len(self)} tokens",
                REBUILD,
            )
        return ends

    def _read(self, number: int, start: int, stop: int) -> NDArray[np.int32]:
        shard = self._shards[number]
        ids = self._ids(number, shard)[start:stop]
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high > shard.max_id:  # kernels index tables by them
            raise ArtifactError(
                f"{self.directory / shard.files[0]} must hold ids in 0..{shard.max_id}",
                f"ids from {low} to {high}",
                REBUILD,
            )
        return ids

    def _ids(self, number: int, shard: Shard) -> NDArray[np.int32]:
        # Another thread may let go of any map between two lines.
        ids = self._maps.get(number)
        if ids is None:
            with _OPENING:
                ids = mapped(self.directory / shard.files[0], TOKENS, shard.tokens)
                self._maps[number] = ids
                if len(self._maps) > _OPEN_SHARDS:
                    self._maps.popitem(last=False)
        return ids
