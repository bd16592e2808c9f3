"""Data files of tasks: errors name file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from umim_core.errors import CorpusError
from umim_core.task_sets.choice_questions import read_objects


@pytest.mark.parametrize("line", ["{", "[1]", "1" * 5000])
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"a": 1}}\n\n{line}\n', encoding="utf-8")
    with pytest.raises(CorpusError, match=r"rows.jsonl:3 must be one JSON object"):
        list(read_objects(path))
