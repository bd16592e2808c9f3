"""Task rules of a recipe: within its budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.tiny_pipeline import Walk
from tasks.stages.adapt import task_rules_stage

pytestmark = pytest.mark.full  # a whole run is in its fixture


def test_the_budget_of_a_recipe_limits_the_task_rules(tiny_run: Walk, tmp_path: Path) -> None:
    (call,) = (call for call in tiny_run.calls if call.name == "task-rules")
    task, cell, rules, max_tokens = call.args
    free = int(call.artifact.metrics["rules_2"])
    limited = rules.model_copy(update={"rule_budget": free // 2})
    made = task_rules_stage(tmp_path, task, cell, limited, max_tokens)
    assert 0 < made.metrics["rules_2"] <= free // 2 < free
