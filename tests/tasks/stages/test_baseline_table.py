"""Tables with baselines: what each setting drops of prompts, or of the cache behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.tiny_table import (
    generated_table,
    run_table,
    tiny_table,
    write_problems,
    write_questions,
)
from tasks.data.table_scores import read_report
from tasks.stages.table import TABLE
from umim_core.config.table_recipe import TableRecipe, TableSetting

SETTINGS: list[dict[str, Any]] = [
    {"name": "base", "merge": "none"},
    {"name": "own", "merge": "prompt"},
    {"name": "matched", "merge": "prompt", "method": "truncation"},
    {"name": "target", "merge": "prompt", "method": "truncation", "target_tr": 0.5},
    {"name": "evicted", "merge": "prompt", "method": "span-eviction-0"},
]


def rows(root: Path, recipe: TableRecipe) -> dict[str, dict[str, Any]]:
    """The rows of a table by setting."""
    found = read_report(run_table(root, recipe).artifacts[-1].path / TABLE)
    return {row["setting"]: row for row in found["scores"]}


@pytest.mark.parametrize("generated", [False, True], ids=["scored", "generated"])
def test_baselines_drop_what_the_rules_save_or_what_they_are_asked_for(
    tiny_checkpoint: Path, tmp_path: Path, generated: bool
) -> None:
    make, write = (generated_table, write_problems) if generated else (tiny_table, write_questions)
    options = {"questions": 2, "settings": SETTINGS} | ({"answers": 1} if generated else {})
    found = rows(tmp_path, make(tiny_checkpoint, write(tmp_path / "data"), **options))
    prompts = {name: row["context_token_reduction"] for name, row in found.items()}
    assert prompts["base"] is None
    assert prompts["matched"] == prompts["own"] > 0.0 == prompts["evicted"]
    assert prompts["target"] == pytest.approx(0.5, abs=0.05)  # half a token of each prompt
    caches = {name: row["cache_reduction"] for name, row in found.items()}
    assert 0.0 < caches.pop("evicted") < prompts["own"]  # the first token's column always stays
    assert set(caches.values()) == {None}


def test_a_setting_without_a_target_has_the_key_of_before() -> None:
    before = {"name": "a", "merge": "prompt", "raw_tail": 0, "method": "truncation"}
    assert TableSetting.model_validate(before).model_dump() == before


def test_a_target_needs_a_baseline() -> None:
    with pytest.raises(ValueError, match="name one as method"):
        TableSetting(name="a", merge="prompt", target_tr=0.1)
