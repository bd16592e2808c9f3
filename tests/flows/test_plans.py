"""The whole graph of several recipes: every stage, its inputs by name, its parts of the recipe.

A graph changes on purpose or by mistake. On purpose:
`python -m tests.support.flow_plans`, and read the diff of ``tests/flows/plans``.
"""

from __future__ import annotations

import difflib
from itertools import takewhile

import pytest

from support.flow_plans import GOLDEN, RECIPES, golden_path, plan_text
from umim_core.config.recipe import DEFAULT_TASK


@pytest.mark.parametrize("name", RECIPES)
def test_every_stage_gets_what_the_golden_graph_says(name: str) -> None:
    expected, found = golden_path(name).read_text(encoding="utf-8"), plan_text(name)
    changes = difflib.unified_diff(
        expected.splitlines(), found.splitlines(), "golden", "now", lineterm="", n=6
    )
    assert found == expected, "\n".join(changes)


def test_every_golden_graph_belongs_to_a_recipe() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(RECIPES)


def inputs_of(graph: list[str], artifact: str) -> dict[str, str]:
    """What the stage that made an artifact was given, by parameter."""
    number = artifact.partition("-")[0]
    start = next(i for i, line in enumerate(graph) if line.startswith(f"{number} ")) + 1
    given = takewhile(lambda line: line.startswith("    "), graph[start:])
    return dict(line.strip().split(": ") for line in given)


def test_each_setting_is_measured_with_its_own_checkpoint_and_starts_from_the_one_before() -> None:
    graph = plan_text("embedded").splitlines()
    start = graph.index("report: CellResult 0") + 1
    cell = takewhile(lambda line: line.startswith("    "), graph[start:])
    made = dict(line.strip().split(": ") for line in cell)
    for setting in ("WT", "WT + Rules", "WT + FT", "Task-Adapted"):
        checkpoint = f"{made[f'settings {setting}']}/checkpoint"
        for measured in ("evaluations", f"scores {DEFAULT_TASK}"):
            assert inputs_of(graph, made[f"{measured} {setting}"])["checkpoint"] == checkpoint
    assert inputs_of(graph, made["settings Task-Adapted"])["start"] == made["settings WT + FT"]
    assert inputs_of(graph, made["settings WT + FT"])["start"] == made["settings WT + Rules"]
