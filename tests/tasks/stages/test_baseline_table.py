"""Tables with baselines: what each setting drops of prompts, or of the cache behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.tiny_table import (
    generated_table,
    run_table,
    tiny_table,
    write_hub,
    write_questions,
)
from tasks.data.table_jobs import ModelPlace, read_report, score_shard
from tasks.stages.table import TABLE
from umim_core.config.table_recipe import TableRecipe, TableSetting
from umim_core.errors import BackboneError
from umim_core.evaluation.questions import QuestionSet, QuestionSource
from umim_core.store.artifacts import directory_digest

SETTINGS: list[dict[str, Any]] = [
    {"name": "base", "merge": "none"},
    {"name": "own", "merge": "prompt"},
    {"name": "matched", "merge": "prompt", "method": "truncation"},
    {"name": "target", "merge": "prompt", "method": "truncation", "target_tr": 0.5},
    {"name": "evicted", "merge": "prompt", "method": "span-eviction-0"},
    {"name": "kept", "merge": "prompt", "method": "truncation", "target_tr": 0.5, "raw_tail": 99},
]


def rows(root: Path, recipe: TableRecipe) -> dict[str, dict[str, Any]]:
    """The rows of a table by setting."""
    found = read_report(run_table(root, recipe).artifacts[-1].path / TABLE)
    return {row["setting"]: row for row in found["scores"]}


@pytest.mark.parametrize("generated", [False, True], ids=["scored", "generated"])
def test_baselines_drop_what_the_rules_save_or_what_they_are_asked_for(
    tiny_checkpoint: Path, tmp_path: Path, generated: bool
) -> None:
    make, write = (generated_table, write_hub) if generated else (tiny_table, write_questions)
    options = {"questions": 2, "settings": SETTINGS} | ({"answers": 1} if generated else {})
    found = rows(tmp_path, make(tiny_checkpoint, write(tmp_path / "data"), **options))
    prompts = {name: row["context_token_reduction"] for name, row in found.items()}
    assert prompts["base"] is None
    assert prompts["matched"] == prompts["own"] > 0.0 == prompts["evicted"]
    assert prompts["target"] == pytest.approx(0.5, abs=0.05)  # half a token of each prompt
    assert prompts["kept"] == 0.0  # a raw tail as long as the prompts must stay
    caches = {name: row["cache_reduction"] for name, row in found.items()}
    assert 0.0 < caches.pop("evicted") < prompts["own"]  # the first token's column always stays
    assert set(caches.values()) == {None}
    over = {name: row["shortfall"] for name, row in found.items()}
    assert over["base"] is over["own"] is None
    assert over["matched"] == over["target"] == 0.0 < over["evicted"]
    assert over["kept"] == pytest.approx(0.5, abs=0.05)
    # Of a span that begins a prompt the first column stays: what eviction lacks to the rules.
    assert over["evicted"] == pytest.approx(prompts["own"] - found["evicted"]["cache_reduction"])


def test_a_worker_with_another_commit_of_a_baselines_own_model_is_refused(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    digest = directory_digest(tiny_checkpoint)
    place = ModelPlace(str(tiny_checkpoint), digest, "cpu", "float32", 4)
    source = QuestionSource("umim_docstrings", folder=str(write_questions(tmp_path)))
    setting = TableSetting(name="a", merge="prompt", method="truncation")
    questions = QuestionSet(1, "", ("acc",))
    with pytest.raises(BackboneError, match=r"truncation \(o/c@commit\); got truncation"):
        score_shard(place, setting, source, questions, 0, 1, "o/c@commit")


def test_a_target_needs_a_baseline() -> None:
    with pytest.raises(ValueError, match="name one as method"):
        TableSetting(name="a", merge="prompt", target_tr=0.1)
