"""Token ids of the benchmarks: from a file, from text, from an earlier run."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common import parse
from benchmarks.corpus import CORPUS_OPTIONS, EMBEDDED, build_ids, ids_file, open_ids
from benchmarks.row_texts import spread_rows
from umim_core.backbone.tokenizer_files import load_tokenizer

TEXT = "Return the sum of array elements over a given axis.\n" * 50


def options(*arguments: object) -> argparse.Namespace:
    return parse("Doc.", CORPUS_OPTIONS, [str(argument) for argument in arguments])


def test_a_file_of_ids_is_taken_as_it_is(tmp_path: Path) -> None:
    assert ids_file(options("--ids", tmp_path / "x.npy")) == (tmp_path / "x.npy").resolve()


def test_ids_and_text_exclude_each_other() -> None:
    with pytest.raises(SystemExit, match="--ids and --text exclude each other"):
        ids_file(options("--ids", "x.npy", "--text", "x.txt"))


def test_what_was_built_before_is_not_built_again(tmp_path: Path) -> None:
    (tmp_path / "docstrings.npy").touch()
    assert ids_file(options("--cache", tmp_path)) == (tmp_path / "docstrings.npy").resolve()


def test_text_becomes_the_ids_of_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    count = build_ids(tmp_path / "ids.npy", tmp_path / "text.txt", EMBEDDED)
    ids = open_ids(tmp_path / "ids.npy")
    assert len(ids) == count > 100
    assert load_tokenizer(EMBEDDED).decode(ids.tolist()) == TEXT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.npy", "text.txt"]


@pytest.mark.full
def test_text_is_tokenized_once_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    given = options("--text", tmp_path / "text.txt", "--cache", tmp_path / "cache")
    built = ids_file(given)
    before = built.stat().st_mtime_ns
    assert len(open_ids(built)) > 100
    assert ids_file(given) == built and built.stat().st_mtime_ns == before


def test_only_the_first_ids_are_read_where_a_number_is_given(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(10))
    assert open_ids(tmp_path / "ids.npy", 4).tolist() == [0, 1, 2, 3]


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


def test_rows_of_another_text_are_left_out() -> None:
    parts = [np.arange(16)]
    first = spread_rows(parts, 2, 4)
    assert [row[0] for row in first] == [0, 8]
    assert [row[0] for row in spread_rows(parts, 2, 4, first)] == [4, 12]
    with pytest.raises(SystemExit, match="only 2 rows of 4 tokens, 3 are wanted"):
        spread_rows(parts, 3, 4, first)
