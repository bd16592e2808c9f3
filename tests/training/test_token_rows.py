"""Rows on disk: round trip, merging up to a border, and array files that are none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.token_artifacts import write_documents
from umim_core.errors import ArtifactError
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.training.token_rows import TokenRows

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
    corpus = write_documents(tmp_path / "corpus", *np.split(np.arange(23), [6, 12, 18]))
    TokenRows.of_segments(corpus, 4).save(tmp_path / "rows")
    back = TokenRows.load(tmp_path / "rows")
    assert not (tmp_path / "rows" / "ids.npy").exists()
    assert [back.row(i).tolist() for i in range(len(back))] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
        [16, 17, 18, 19],
    ]


def test_rows_whose_shards_are_gone_are_refused(tmp_path: Path) -> None:
    corpus = write_documents(tmp_path / "corpus", *np.split(np.arange(9), [6]))
    TokenRows.of_segments(corpus, 4).save(tmp_path / "rows")
    (tmp_path / "corpus").rename(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match=r"index\.json must exist"):
        TokenRows.load(tmp_path / "rows")


@pytest.mark.parametrize(("index", "lengths"), [(0, [2, 1, 1]), (1, []), (2, [2])])
def test_tokens_behind_the_border_stay_raw(index: int, lengths: list[int]) -> None:
    starts, found = ROWS.segment(index, Matcher(RuleSet.from_spans([(1, 2)])))
    assert found.tolist() == lengths
    assert starts.tolist() == (np.cumsum(lengths) - lengths).tolist()
