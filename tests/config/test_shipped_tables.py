"""Recipes of the paper's tables: they validate, belong to a table, and refuse what cannot be."""

from __future__ import annotations

import pytest

from flows.parts import plan
from tasks.report.paper import paper_tables
from tasks.run.recipes import find_recipe, recipe_names
from umim_core.config.table_recipe import TableRecipe
from umim_core.errors import ConfigError

LABELS = {table.label for table in paper_tables()}


@pytest.mark.parametrize("name", recipe_names("tables/"))
def test_a_table_recipe_is_valid_and_of_a_table_of_the_paper(name: str) -> None:
    recipe = find_recipe(name)
    assert isinstance(recipe, TableRecipe)
    assert name == f"tables/{recipe.name}" and recipe.table in LABELS
    steps = [step["stage"] for step in plan(recipe)]
    cells = len(recipe.tasks) * len(recipe.settings)
    expected = ["questions"] * len(recipe.tasks) + ["shards"] * cells + ["text"] * len(recipe.texts)
    assert [step for step in steps if step != "mined"] == [*expected, "table"]
    mined = sum(setting.mine_tau is not None for setting in recipe.settings)
    assert steps.count("mined") == len(recipe.tasks) * mined


def test_the_papers_own_backbones_take_the_checkpoint_of_their_recipe() -> None:
    ours = ("-smollm2", "-qwen")
    paper_recipes = [
        find_recipe(name) for name in recipe_names("tables/") if not name.endswith(ours)
    ]
    assert len(paper_recipes) == 11
    for recipe in paper_recipes:
        assert isinstance(recipe, TableRecipe) and recipe.cluster.use_gpu
        assert recipe.checkpoint.partition("/")[0] in recipe_names()


def test_every_table_of_tasks_has_a_variant_of_the_packaged_model() -> None:
    names = [name.removeprefix("tables/") for name in recipe_names("tables/")]
    kinds = {name.removesuffix("-smollm2") for name in names if name.endswith("-smollm2")}
    assert all(any(name.startswith(f"{kind}-") for kind in kinds) for name in names)


def test_no_shipped_recipe_confirms_programs_by_itself() -> None:
    recipes = [find_recipe(name) for name in recipe_names("tables/")]
    assert not any(getattr(recipe, "confirm_run_unsafe_code", None) for recipe in recipes)


def test_an_unknown_table_lists_all_and_names_the_closest() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'tables/perplexity-smollm2'\?"):
        find_recipe("tables/perplexity-smollm")
