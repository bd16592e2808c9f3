"""Files of trajectories: what is written is read, and what is torn is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from umim_core.errors import ArtifactError
from umim_core.synthetic_corpora.questions import (
    Selection,
    TrajectoryRow,
    iter_rows,
    read_selection,
    shard_path,
    write_selection,
    write_shard,
)

ROWS = [TrajectoryRow(0, number, "eos", 5, "two\nlines \u2028 of text") for number in range(2)]
WHOLE = b'{"ended":"eos","question":0,"text":"a","tokens":5,"trajectory":0}\n'


def test_rows_of_all_shards_come_back_in_order(tmp_path: Path) -> None:
    write_shard(tmp_path, 1, ROWS[1:])
    write_shard(tmp_path, 0, ROWS[:1])
    assert list(iter_rows(tmp_path)) == ROWS


def test_a_selection_comes_back(tmp_path: Path) -> None:
    selection = Selection(["a", "b"], too_long=1, duplicates=2, bad_rows=3)
    write_selection(tmp_path, selection)
    assert read_selection(tmp_path) == selection


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (WHOLE[:20], "Invalid JSON"),
        (b"[]\n", "Input should be"),
        (WHOLE.replace(b"a", b"\xff"), "Invalid JSON"),
        (WHOLE.replace(b'"tokens":5,', b""), "tokens: Field required"),
        (WHOLE.replace(b"eos", b"end"), "ended: Input should be"),
        (WHOLE.replace(b"5", b"null"), "tokens: Input should be a valid integer"),
    ],
)
def test_a_torn_shard_is_refused(tmp_path: Path, line: bytes, problem: str) -> None:
    write_shard(tmp_path, 0, ROWS)
    shard_path(tmp_path, 1).write_bytes(WHOLE + line)
    with pytest.raises(ArtifactError, match=f"000001.jsonl:2 must be a trajectory; got {problem}"):
        list(iter_rows(tmp_path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "Input should be"),
        ('{"texts": "a"}', "texts: Input should be a valid list"),
        ('{"texts": [1]}', r"texts\.0: Input should be a valid string"),
        ('{"texts": ["a"], "bad_rows": null}', "bad_rows: Input should be a valid integer"),
    ],
)
def test_torn_questions_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "questions.json").write_text(text, encoding="utf-8")
    with pytest.raises(ArtifactError, match=rf"questions.json must hold .*; got {problem}"):
        read_selection(tmp_path)
