"""Token rows: what training and evaluation read, cut from a corpus or kept on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from umim_core.merging.packing import Segmentation
from umim_core.rules.matcher import Matcher, segment_prefix
from umim_core.store.arrays import open_array, save_array
from umim_core.text.token_files import INDEX, TokenFiles
from umim_core.text.token_ids import Tokens

_ARRAYS = ("ids", "offsets", "merge_until")


@dataclass(frozen=True)
class TokenRows:
    """Rows of raw token ids.

    Attributes:
        ids: All rows' ids, flat [T]; what lies behind the last row is no row's.
        offsets: Row borders [B + 1] (int64).
        merge_until: Per row [B] (int64), how many leading tokens rules may be applied to.
    """

    ids: Tokens
    offsets: NDArray[np.int64]
    merge_until: NDArray[np.int64]

    @classmethod
    def of_segments(cls, stream: Tokens, length: int) -> TokenRows:
        """Cut a corpus into rows of ``length`` tokens, all of them open to merging.

        The rest is dropped. Rows are read from the files when they are asked for.
        """
        offsets = np.arange(len(stream) // length + 1, dtype=np.int64) * length
        return cls(stream, offsets, np.diff(offsets))

    @classmethod
    def of_rows(cls, rows: list[list[int]], merge_until: list[int]) -> TokenRows:
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
        flat = np.array([token for row in rows for token in row], dtype=np.int32)
        return cls(flat, offsets, np.array(merge_until, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> NDArray[np.integer]:
        return self.ids[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def segment(self, index: int, matcher: Matcher) -> Segmentation:
        """Cut one row into units; tokens from ``merge_until`` on stay raw."""
        return segment_prefix(matcher.segment, self.row(index), int(self.merge_until[index]))

    def save(self, directory: Path) -> None:
        """Write rows that were made of lists."""
        directory.mkdir(exist_ok=True)
        for name in _ARRAYS:
            save_array(directory / f"{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, place: Path, length: int) -> TokenRows:
        """Map rows that :meth:`save` wrote, or a corpus in rows of ``length`` tokens.

        The corpus is a folder of token files, or an array of ids.
        """
        if place.is_file():
            return cls.of_segments(open_array(place), length)
        if (place / INDEX).is_file():
            return cls.of_segments(TokenFiles.open(place), length)
        return cls(*(open_array(place / f"{name}.npy") for name in _ARRAYS))
