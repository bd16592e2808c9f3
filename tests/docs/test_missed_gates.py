"""The table of missed gates: which lines it has, and which gate it names."""

from __future__ import annotations

import json
from pathlib import Path

from docs.make.summaries import missed_gates


def write(folder: Path, name: str, gates: dict[str, list[object]]) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"gates": gates}), "utf-8")


def test_a_line_names_the_gate_that_is_furthest_from_its_limit(tmp_path: Path) -> None:
    assert missed_gates(tmp_path) == ""
    write(tmp_path, "met", {"times": [2.0, 1.8, True]})
    (tmp_path / "table.json").write_text("{}", "utf-8")
    assert missed_gates(tmp_path) == ""
    gates: dict[str, list[object]] = {
        "times": [1.7, 1.8, False], "error_rate": [0.5, 0.25, False], "bytes": [1, 50, True],
    }  # fmt: skip
    write(tmp_path, "step", gates)
    write(tmp_path, "zero", {"speed": [0.0, 1.0, False], "time": [3.0, 1.0, False]})
    _, _, *lines = missed_gates(tmp_path).strip().splitlines()
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] == [
        ["[step](results/step.md)", "2", "3", "error rate: 0.5, limit 0.25"],
        ["[zero](results/zero.md)", "2", "2", "speed: 0, limit 1"],
    ]
