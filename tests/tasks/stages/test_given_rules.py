"""Rules that a recipe is given, and task rules within its budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.parts import plan
from support.sites import here
from support.small_recipe import least_recipe
from support.tiny_pipeline import Walk
from tasks.stages.mine import given_rules_stage
from tasks.stages.named import NamedRules, NamedTokenizer
from tasks.stages.train import task_rules_stage
from umim_core.config.recipe import Cell
from umim_core.errors import TokenizerMismatchError
from umim_core.rules.ruleset import RuleSet


@pytest.fixture
def cell(tiny_checkpoint: Path) -> Cell:
    return Cell(
        backbone=str(tiny_checkpoint.parent / "backbone"), rules=str(tiny_checkpoint / "rules")
    )


def test_given_rules_are_taken_over_as_they_are(cell: Cell, tmp_path: Path) -> None:
    given = given_rules_stage(tokenizer=NamedTokenizer(cell.backbone), rules=NamedRules(cell.rules))
    artifact = given.build(here(tmp_path))
    assert RuleSet.load(artifact.path / "rules").digest == RuleSet.load(str(cell.rules)).digest
    assert artifact.metrics["rules_2"] == 1.0
    assert not given.build(here(tmp_path)).executed


def test_rules_of_another_tokenizer_are_refused(cell: Cell, tmp_path: Path) -> None:
    RuleSet.from_spans([(1, 2)], tokenizer_fingerprint="f" * 64).save(tmp_path / "strange")
    strange = NamedRules(str(tmp_path / "strange"))
    with pytest.raises(TokenizerMismatchError):
        given_rules_stage(tokenizer=NamedTokenizer(cell.backbone), rules=strange).build(
            here(tmp_path / "root")
        )


def test_nothing_is_mined_for_such_a_cell(cell: Cell) -> None:
    recipe = least_recipe(cells=[cell.model_dump(), {"backbone": cell.backbone, "tau": 7}])
    made = [step["stage"] for step in plan(recipe)]
    assert made.count("given-rules") == 1
    assert made.count("count") == made.count("filter") == 1


@pytest.mark.full  # a whole run is in its fixture
def test_the_budget_of_a_recipe_limits_the_task_rules(tiny_run: Walk, tmp_path: Path) -> None:
    (call,) = (call for call in tiny_run.calls if call.name == "task-rules")
    given, free = call.call.arguments, int(call.artifact.metrics["rules_2"])
    limited = given["rules"].model_copy(update={"rule_budget": free // 2})
    made = task_rules_stage(**{**given, "rules": limited}).build(here(tmp_path))
    assert 0 < made.metrics["rules_2"] <= free // 2 < free
