"""Scores of a table in a terminal: a line per task and setting; what was not run."""

from __future__ import annotations

from tasks.report.score_lines import score_lines

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


def test_what_a_baseline_dropped_of_the_cache_and_could_not_drop_has_columns() -> None:
    own = {name: value for name, value in ROW.items() if name not in ("answers", "new_tokens")}
    evicted = own | {"setting": "evicted", "cache_reduction": 0.125, "shortfall": 0.0625}
    head, first, line = score_lines({"scores": [own, evicted], "texts": []})
    assert head.split()[-5:] == ["TR", "cache", "TR", "shortfall", "prompt_tr"]
    assert line.split()[-3:] == ["12.5%", "6.2%", "30.0%"] and first.split()[-3:-1] == ["–", "–"]


def test_the_first_setting_has_no_difference_to_itself() -> None:
    base = {"setting": "base", "recall_difference": {"mean": 0.0, "stderr": 0.0}}
    table = {"settings": ["base", "own"], "scores": [ROW | base, ROW], "texts": []}
    _, first, other = score_lines(table)
    assert "0.000" not in first and "-0.250" in other


def test_tasks_of_other_metrics_stand_in_a_table_of_their_own() -> None:
    other = {name: ROW[name] for name in ("setting", "questions")} | {"task": "umim_piqa"}
    table = {"scores": [ROW, other | {"acc": ROW["recall"]}], "texts": []}
    heads = [line.split() for line in score_lines(table) if line.startswith("task")]
    assert ["recall" in head for head in heads] == [True, False]
    assert ["acc" in head for head in heads] == [False, True]


def test_a_task_that_is_not_run_is_a_line_for_all_settings() -> None:
    unrun = {"task": "umim_ruler_16k", "not_run": "not run: context"}
    scores = [ROW, *({**unrun, "setting": setting} for setting in ("base", "own"))]
    lines = score_lines({"scores": scores, "texts": []})
    assert [line for line in lines if "16k" in line] == ["umim_ruler_16k: not run: context"]


def test_texts_have_a_line_per_figure() -> None:
    text = {"text": "WikiText-2", "ppl_base": 23.751, "rows": 32.0}
    assert score_lines({"scores": [], "texts": [text]}) == [
        "WikiText-2: ppl_base 23.75",
        "WikiText-2: rows 32",
    ]
