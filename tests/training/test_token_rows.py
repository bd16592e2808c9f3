"""Rows on disk: round trip, merging up to a border, and array files that are none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.pickle_bomb import PickleBomb, write_bomb
from support.token_artifacts import write_documents
from umim_core.errors import ArtifactError
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.training.token_rows import TokenRows, load_array

ROWS = TokenRows.of_rows([[1, 2, 1, 2], [], [1, 2]], [3, 0, 2])


def test_rows_survive_the_disk(tmp_path: Path) -> None:
    ROWS.save(tmp_path / "rows")
    back = TokenRows.load(tmp_path / "rows")
    assert len(back) == 3
    assert [back.row(i).tolist() for i in range(3)] == [[1, 2, 1, 2], [], [1, 2]]
    assert back.merge_until.tolist() == [3, 0, 2]
    assert isinstance(back.ids, np.ndarray)
    assert not back.ids.flags.owndata, "memory-mapped"


def test_segments_of_shards_are_read_from_the_shards_and_never_copied(tmp_path: Path) -> None:
    corpus = write_documents(tmp_path / "corpus", np.arange(23), shard_tokens=6)
    TokenRows.of_segments(corpus, 4).take(4).save(tmp_path / "rows")
    back = TokenRows.load(tmp_path / "rows")
    assert not (tmp_path / "rows" / "ids.npy").exists()
    assert [back.row(i).tolist() for i in range(len(back))] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
    ]


def test_rows_whose_shards_are_gone_are_refused(tmp_path: Path) -> None:
    corpus = write_documents(tmp_path / "corpus", np.arange(9), shard_tokens=6)
    TokenRows.of_segments(corpus, 4).save(tmp_path / "rows")
    (tmp_path / "corpus").rename(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match=r"index\.json must exist"):
        TokenRows.load(tmp_path / "rows")


@pytest.mark.parametrize(("count", "kept"), [(0, 0), (2, 2), (9, 3)])
def test_the_first_rows_are_taken(count: int, kept: int) -> None:
    taken = ROWS.take(count)
    assert len(taken) == kept
    assert [taken.row(i).tolist() for i in range(kept)] == [
        ROWS.row(i).tolist() for i in range(kept)
    ]


@pytest.mark.parametrize(("index", "lengths"), [(0, [2, 1, 1]), (1, []), (2, [2])])
def test_tokens_behind_the_border_stay_raw(index: int, lengths: list[int]) -> None:
    starts, found = ROWS.segment(index, Matcher(RuleSet.from_spans([(1, 2)])))
    assert found.tolist() == lengths
    assert starts.tolist() == (np.cumsum(lengths) - lengths).tolist()


@pytest.mark.parametrize("how", ["raw", "array"])
@pytest.mark.parametrize("mmap", [False, True])
def test_a_pickle_in_an_array_file_does_nothing(tmp_path: Path, how: str, mmap: bool) -> None:
    fired = tmp_path / "fired"
    write_bomb(tmp_path / "x.npy", PickleBomb(fired), how)
    with pytest.raises(ArtifactError, match=r"x\.npy must be an \.npy array"):
        load_array(tmp_path / "x.npy", mmap=mmap)
    assert not fired.exists()
