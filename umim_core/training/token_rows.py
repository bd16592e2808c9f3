"""Token rows: what training and evaluation read, cut from a corpus or kept on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import ArtifactError
from umim_core.merging.packing import Segmentation
from umim_core.rules.matcher import Matcher, Parts, segment_parts
from umim_core.store.arrays import open_array, save_array
from umim_core.text.token_ids import MAX_TOKEN_ID, AnyInts, flat, id_array
from umim_core.text.tokens import IDS, TokenFiles

_ARRAYS = ("ids", "offsets", "parts", "replies")


@dataclass(frozen=True)
class TokenRows:
    """Rows of raw token ids.

    Attributes:
        ids: All rows' ids, flat [T]; what lies behind the last row is no row's.
        offsets: Row borders [B + 1] (int64).
        parts: What rules may be applied to [P, 3] (int64): row, first token in it, end; in order.
            Each part is cut on its own; everything else stays raw.
        replies: Where in each row a reply begins [B] (int64); empty where rows have none.
        size: Ids that are known; a row of a file that was altered may hold others, and is refused.
    """

    ids: AnyInts
    offsets: NDArray[np.int64]
    parts: NDArray[np.int64]
    replies: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    size: int = MAX_TOKEN_ID + 1

    @classmethod
    def of_segments(cls, stream: AnyInts, length: int) -> TokenRows:
        """Cut a corpus into rows of ``length`` tokens, all of them open to merging.

        The rest is dropped. Rows are read from the files when they are asked for.
        """
        offsets = np.arange(len(stream) // length + 1, dtype=np.int64) * length
        return cls(stream, offsets, _beginnings(np.diff(offsets)))

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[int]], merge_until: Sequence[int]) -> TokenRows:
        """Make rows of which rules may be applied to so many leading tokens."""
        return cls(*flat(rows), _beginnings(np.array(merge_until, dtype=np.int64)))

    @classmethod
    def of_parts(
        cls, rows: Sequence[Sequence[int]], parts: Sequence[Parts], replies: Sequence[int] = ()
    ) -> TokenRows:
        """Make rows of which rules may be applied to some parts, (first token, end)."""
        listed = [(row, *part) for row, own in enumerate(parts) for part in own]
        at = np.array(replies, dtype=np.int64)
        return cls(*flat(rows), np.array(listed, dtype=np.int64).reshape(-1, 3), at)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> NDArray[np.integer]:
        ids = self.ids[int(self.offsets[index]) : int(self.offsets[index + 1])]
        id_array(ids, self.size, f"row {index}: ", ArtifactError)  # embeddings are read by them
        return ids

    def parts_of(self, index: int) -> Parts:
        """Return the parts of a row, as (first token, end)."""
        low, high = np.searchsorted(self.parts[:, 0], [index, index + 1])
        return tuple((int(first), int(end)) for _, first, end in self.parts[low:high])

    def segment(self, index: int, matcher: Matcher) -> Segmentation:
        return segment_parts(matcher.segment, self.row(index), self.parts_of(index))

    def save(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        for name in _ARRAYS:
            save_array(directory / f"{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, place: Path, length: int, size: int = MAX_TOKEN_ID + 1) -> TokenRows:
        """Map rows that :meth:`save` wrote, or a corpus in rows of ``length`` tokens.

        The corpus is a folder of token files, or an array of ids; ids lie below ``size``.
        """
        if place.is_file():
            rows = cls.of_segments(open_array(place), length)
        elif (place / IDS).is_file():
            rows = cls.of_segments(TokenFiles.open(place).ids, length)
        else:
            ids, offsets, parts, replies = (open_array(place / f"{name}.npy") for name in _ARRAYS)
            rows = cls(ids, offsets, parts, replies)
        return replace(rows, size=size)


def _beginnings(merge_until: NDArray[np.int64]) -> NDArray[np.int64]:
    rows = np.arange(len(merge_until), dtype=np.int64)
    return np.stack([rows, np.zeros_like(rows), merge_until], axis=1)
