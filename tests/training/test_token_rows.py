"""Rows on disk: round trip, merging in parts of rows alone, and array files that are none."""

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
PARTS = TokenRows.of_parts([[1, 2] * 4, [1, 2], [1, 2]], [((1, 4), (4, 6)), (), ((0, 2),)])


def test_rows_survive_the_disk(tmp_path: Path) -> None:
    ROWS.save(tmp_path / "rows")
    back = TokenRows.load(tmp_path / "rows", 9)
    assert [back.row(i).tolist() for i in range(len(back))] == [[1, 2, 1, 2], [], [1, 2]]
    assert [back.parts_of(i) for i in range(3)] == [((0, 3),), ((0, 0),), ((0, 2),)]
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


@pytest.mark.parametrize(
    ("rows", "index", "lengths"),
    [
        (ROWS, 0, [2, 1, 1]),
        (ROWS, 1, []),
        (ROWS, 2, [2]),
        (PARTS, 0, [1, 1, 2, 2, 1, 1]),
        (PARTS, 1, [1, 1]),
        (PARTS, 2, [2]),
    ],
)
def test_tokens_outside_of_the_parts_stay_raw(
    rows: TokenRows, index: int, lengths: list[int]
) -> None:
    starts, found = rows.segment(index, Matcher(RuleSet.from_spans([(1, 2)])))
    assert found.tolist() == lengths
    assert starts.tolist() == (np.cumsum(lengths) - lengths).tolist()
