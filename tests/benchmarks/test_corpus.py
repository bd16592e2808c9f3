"""Token ids of the benchmarks: from a file, from text, from an earlier run."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common import parse
from benchmarks.corpus import CORPUS_OPTIONS, EMBEDDED, build_ids, ids_file, open_ids
from benchmarks.merged_quality import spread_rows
from umim_core.backbone.tokenizer_files import load_tokenizer

TEXT = "Return the sum of array elements over a given axis.\n" * 50


def options(*arguments: object) -> argparse.Namespace:
    return parse("Doc.", CORPUS_OPTIONS, [str(argument) for argument in arguments])


def test_a_file_of_ids_is_taken_as_it_is(tmp_path: Path) -> None:
    assert ids_file(options("--ids", tmp_path / "x.npy")) == (tmp_path / "x.npy").resolve()


def test_text_becomes_the_ids_of_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    count = build_ids(tmp_path / "ids.npy", tmp_path / "text.txt", EMBEDDED)
    ids = open_ids(tmp_path / "ids.npy")
    assert len(ids) == count > 100
    assert load_tokenizer(EMBEDDED).decode(ids.tolist()) == TEXT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.npy", "text.txt"]


@pytest.mark.parametrize("array", [np.zeros((2, 2), np.int32), np.zeros(3)])
def test_what_is_no_flat_array_of_integers_is_refused(array: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", array)
    with pytest.raises(SystemExit, match=r"ids\.npy must hold one flat array of integers"):
        open_ids(tmp_path / "ids.npy")


def test_rows_are_evenly_spaced_over_the_segments_of_all_files() -> None:
    parts = [np.arange(11), np.arange(100, 113)]  # segments 0 4 | 100 104 108
    assert [row.tolist() for row in spread_rows(parts, 3, 4)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [104, 105, 106, 107],
    ]
    with pytest.raises(SystemExit, match="only 5 rows of 4 tokens, 6 are wanted"):
        spread_rows(parts, 6, 4)
