from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.examples import PROMPTS, bracketed, main
from docs.make.results import documents_of
from umim_core.model.showing import Piece


def test_merged_spans_stand_in_brackets_and_nothing_else_changes() -> None:
    shown = bracketed([Piece("Return", 1), Piece(" the value", 2), Piece(" of it", 1)])
    assert re.fullmatch(r"[^\[\]]*\[[^\[\]]+\][^\[\]]*", shown)
    assert re.sub(r"[\[\] ]", "", shown) == "Returnthevalueofit"


def test_a_run_holds_texts_attention_and_cosines_and_has_a_page(tmp_path: Path) -> None:
    out = tmp_path / "examples-tiny.json"
    assert main(["--checkpoint", "umim-docs-llama", "--new-tokens", "3", "--out", str(out)]) == 0
    report = json.loads(out.read_text("utf-8"))
    assert [len(report["greedy"]), len(report["sampled"])] == [len(PROMPTS), 3]
    assert any("[" in row["prompt"] for row in report["greedy"])
    plain = [re.sub(r"[\[\] ]", "", row["prompt"]) for row in report["greedy"]]
    assert plain == [prompt.replace(" ", "") for prompt in PROMPTS]
    assert not any("[" in row["base"] for row in report["greedy"])
    for side in ("before", "after"):
        assert [sum(row) for row in report["attention"][side]] == pytest.approx(
            [1.0] * len(report["attention"]["units"]), abs=1e-3
        )
    assert all(len(row["by_offset"]) == row["order"] for row in report["similarity"])
    page, figure = documents_of(out)
    assert "umim-docs-llama" in page.make() and "<svg" in figure.make()
