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
    back = TokenRows.load(tmp_path / "rows", 9)
    assert [back.row(i).tolist() for i in range(len(back))] == [[1, 2, 1, 2], [], [1, 2]]
    assert back.merge_until.tolist() == [3, 0, 2]
    assert isinstance(back.ids, np.ndarray) and not back.ids.flags.owndata, "memory-mapped"


def test_a_corpus_is_read_from_its_files_and_never_copied(tmp_path: Path) -> None:
    write_documents(tmp_path / "corpus", *np.split(np.arange(23), [6, 12, 18]))
    np.save(tmp_path / "ids.npy", np.arange(23, dtype=np.uint32))
    for name in ("corpus", "ids.npy"):
        rows = TokenRows.load(tmp_path / name, 4)
        found = [rows.row(i).tolist() for i in range(len(rows))]
        assert found == np.arange(20).reshape(5, 4).tolist()
    with pytest.raises(ArtifactError, match=r"must be an \.npy array"):
        TokenRows.load(tmp_path / "gone", 4)


def test_tokens_behind_the_border_stay_raw() -> None:
    matcher = Matcher(RuleSet.from_spans([(1, 2)]))
    cuts = [ROWS.segment(index, matcher) for index in range(3)]
    assert [lengths.tolist() for _, lengths in cuts] == [[2, 1, 1], [], [2]]
    assert [starts.tolist() for starts, _ in cuts] == [[0, 2, 3], [], [0]]
