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
    assert [back.row(i).tolist() for i in range(len(back))] == [[1, 2, 1, 2], [], [1, 2]]
    assert back.merge_until.tolist() == [3, 0, 2]
    assert isinstance(back.ids, np.ndarray) and not back.ids.flags.owndata, "memory-mapped"


def test_segments_of_token_files_are_read_from_them_and_never_copied(tmp_path: Path) -> None:
    corpus = write_documents(tmp_path / "corpus", *np.split(np.arange(23), [6, 12, 18]))
    TokenRows.of_segments(corpus, 4).save(tmp_path / "rows")
    back = TokenRows.load(tmp_path / "rows")
    assert not (tmp_path / "rows" / "ids.npy").exists()
    found = [back.row(i).tolist() for i in range(len(back))]
    assert found == np.arange(20).reshape(5, 4).tolist()
    (tmp_path / "corpus").rename(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match=r"index\.json must exist"):
        TokenRows.load(tmp_path / "rows")


def test_tokens_behind_the_border_stay_raw() -> None:
    matcher = Matcher(RuleSet.from_spans([(1, 2)]))
    cuts = [ROWS.segment(index, matcher) for index in range(3)]
    assert [lengths.tolist() for _, lengths in cuts] == [[2, 1, 1], [], [2]]
    assert [starts.tolist() for starts, _ in cuts] == [[0, 2, 3], [], [0]]
