from __future__ import annotations

from flows.launch import score_lines

ROW = {
    "task": "umim_ruler_1k",
    "setting": "own",
    "questions": 1200,
    "new_tokens": 64,
    "answers": 1,
    "token_reduction": 0.25,
    "recall": {"mean": 0.5, "stderr": 0.125},
    "recall_difference": {"mean": -0.25, "stderr": None},
    "prompt_tr": {"mean": 0.3, "stderr": 0.01},
}


def test_a_task_under_a_setting_is_one_line_with_its_limits_errors_and_differences() -> None:
    head, line, *rest = score_lines({"scores": [ROW], "texts": []})
    cells = ["umim_ruler_1k", "own", "1,200", "1 x 64", "0.500 ± 0.125", "-0.250", "25.0%", "30.0%"]
    assert [cell.strip() for cell in line.split("  ") if cell] == cells
    assert head.split()[-2:] == ["TR", "prompt_tr"] and rest == []
