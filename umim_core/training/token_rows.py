"""Token rows on disk: what training and evaluation read, as flat arrays and offsets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from umim_core.merging.packing import Segmentation
from umim_core.rules.matcher import Matcher, segment_prefix
from umim_core.store.arrays import open_array, save_array
from umim_core.store.artifacts import read_json, write_json
from umim_core.text.token_files import TokenFiles

_FOLDER = "token_files.json"


@dataclass(frozen=True)
class TokenRows:
    """Rows of raw token ids.

    Attributes:
        ids: All rows' ids, flat [T] (int32); what lies behind the last row is no row's.
        offsets: Row borders [B + 1] (int64).
        merge_until: Per row [B] (int64), how many leading tokens rules may be applied to.
    """

    ids: NDArray[np.int32] | TokenFiles
    offsets: NDArray[np.int64]
    merge_until: NDArray[np.int64]

    @classmethod
    def of_segments(cls, stream: NDArray[np.int32] | TokenFiles, length: int) -> TokenRows:
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

    def row(self, index: int) -> NDArray[np.int32]:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def segment(self, index: int, matcher: Matcher) -> Segmentation:
        """Cut one row into units; tokens from ``merge_until`` on stay raw."""
        return segment_prefix(matcher.segment, self.row(index), int(self.merge_until[index]))

    def save(self, directory: Path) -> None:
        """Write the rows into a new directory; token files are named, not copied."""
        directory.mkdir(exist_ok=True)
        if isinstance(self.ids, TokenFiles):
            write_json(directory / _FOLDER, str(self.ids.directory.resolve()))
        else:
            ids = self.ids[: int(self.offsets[-1])]
            save_array(directory / "ids.npy", ids)
        for name in ("offsets", "merge_until"):
            save_array(directory / f"{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, directory: Path) -> TokenRows:
        """Read what :meth:`save` wrote; the ids are memory-mapped."""
        ids: NDArray[np.int32] | TokenFiles
        if (directory / _FOLDER).exists():
            ids = TokenFiles.open(Path(str(read_json(directory / _FOLDER))))
        else:
            ids = open_array(directory / "ids.npy")
        borders = (open_array(directory / f"{name}.npy") for name in ("offsets", "merge_until"))
        return cls(ids, *borders)
