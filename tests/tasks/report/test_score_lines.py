"""Scores of a table in a terminal: a line per metric, with its limits; what was not run."""

from __future__ import annotations

from tasks.report.score_lines import score_lines

ROW = {
    "task": "umim_ruler_1k",
    "setting": "own",
    "questions": 1200,
    "new_tokens": 64,
    "answers": 1,
    "token_reduction": 0.25,
    "recall": {"mean": 0.5, "std": 0.125},
    "recall_difference": {"mean": -0.25, "std": None},
    "prompt_tr": {"mean": 0.3, "std": 0.01},
}


def test_a_metric_stands_with_its_limits_its_error_and_its_difference() -> None:
    _, recall, reduction = score_lines({"scores": [ROW], "texts": []})
    cells = ["umim_ruler_1k", "own", "recall", "1,200", "1 x 64", "25.0%", "0.500 ± 0.125"]
    assert [cell.strip() for cell in recall.split("  ") if cell] == [*cells, "-0.250"]
    assert reduction.split()[-4:] == ["0.300", "±", "0.010", "–"]


def test_a_task_that_is_not_run_is_a_line() -> None:
    unrun = {"task": "umim_ruler_16k", "setting": "own", "not_run": "not run: context"}
    lines = score_lines({"scores": [ROW, unrun], "texts": []})
    assert "umim_ruler_16k  own      not run: context" in lines[-1]


def test_texts_have_a_line_per_figure() -> None:
    text = {"text": "WikiText-2", "ppl_base": 23.751, "rows": 32.0}
    assert score_lines({"scores": [], "texts": [text]}) == [
        "WikiText-2: ppl_base 23.75",
        "WikiText-2: rows 32",
    ]
