"""Finished cells of benchmarks: found by their key, and by no other."""

from __future__ import annotations

from pathlib import Path

from benchmarks.ladder.finished_cells import find_cell, keep_cell


def test_a_cell_of_another_key_is_not_found(tmp_path: Path) -> None:
    key = {"task": "piqa", "side": "no rules", "limit": 3}
    assert find_cell(tmp_path, key) is None
    keep_cell(tmp_path, key, {"questions": 3})
    assert find_cell(tmp_path, key) == {"key": key, "questions": 3}
    assert find_cell(tmp_path, key | {"limit": 4}) is None
    assert [path.name[:14] for path in tmp_path.iterdir()] == ["piqa-no-rules-"]
