from __future__ import annotations

import json
from pathlib import Path

import pytest

from umim_core.errors import CorpusError
from umim_core.task_sets.spec import Question, read_questions


def test_questions_are_read_in_order_and_extra_keys_ignored(tmp_path: Path) -> None:
    rows = [{"id": "q1", "context": "a\u2028b", "choices": ["x", "y"], "gold": 1}]
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n\n", "utf-8")
    assert read_questions(path) == [Question("a\u2028b", ("x", "y"), 1, "q1")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "q.jsonl:1: a line must be JSON"),
        ('{"context": "c", "choices": ["a", "b"]}', "q.jsonl:1 must hold context"),
        ('{"context": "c", "choices": ["a", "b"], "gold": true}', "q.jsonl:1 must hold context"),
        ('{"context": "c", "choices": ["a"], "gold": 0}', "q.jsonl:1: .* at least two choices"),
        (
            '{"context": "\\ud800", "choices": ["a", "b"], "gold": 0}',
            "1: text must not hold lone surrogates",
        ),
        ("[" * 100_000, "q.jsonl: a file that begins with \\[ must be one whole JSON array"),
        ("1" * 5000, "q.jsonl:1: a line must be JSON"),
        ('{"context": "c", "choices": ["a", "b"], "gold": 0}\n\n[1]', "q.jsonl:3: a row must be a"),
        ("", "must hold questions"),
    ],
)
def test_bad_lines_name_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(line + "\n", "utf-8")
    with pytest.raises(CorpusError, match=message):
        read_questions(path)


def test_an_unreadable_file_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b"\xff\xfe")
    for name, message in (("bad.jsonl", "must be UTF-8"), ("missing.jsonl", "must be readable")):
        with pytest.raises(CorpusError, match=message):
            read_questions(tmp_path / name)
