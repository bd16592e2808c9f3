"""The whole graph of several recipes: every stage, its inputs by name, its parts of the recipe.

A graph changes on purpose or by mistake. On purpose:
`python -m tests.support.flow_plans`, and read the diff of ``tests/flows/plans``.
"""

from __future__ import annotations

import difflib

import pytest

from support.flow_plans import GOLDEN, RECIPES, golden_path, plan_text


@pytest.mark.parametrize("name", RECIPES)
def test_every_stage_gets_what_the_golden_graph_says(name: str) -> None:
    expected, found = golden_path(name).read_text(encoding="utf-8"), plan_text(name)
    changes = difflib.unified_diff(
        expected.splitlines(), found.splitlines(), "golden", "now", lineterm="", n=6
    )
    assert found == expected, "\n".join(changes)


def test_every_golden_graph_belongs_to_a_recipe() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(RECIPES)
