"""Recipes and artifacts by name; light, so that the command line answers at once."""

from __future__ import annotations

from pathlib import Path

from tasks.cluster.ray_cluster import CHECKOUT
from umim_core.adaptation.settings import adaptation_steps
from umim_core.checkpoint.checkpoint_index import artifact_root
from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.config.corpus import corpus_kinds
from umim_core.config.model_base import SPLITS
from umim_core.config.recipe import Recipe
from umim_core.config.recipe_files import AnyRecipe, load_any_recipe
from umim_core.config.table_recipe import TableRecipe
from umim_core.errors import ConfigError, did_you_mean, require
from umim_core.task_sets.spec import TASKS

RECIPES = CHECKOUT / "infra" / "recipes"


def recipe_names(folder: str = "") -> list[str]:
    """Return the names of shipped recipes: of the pipeline, of ``tables/`` or ``adaptation/``."""
    return sorted(f"{folder}{path.stem}" for path in (RECIPES / folder).glob("*.yaml"))


def all_names() -> list[str]:
    return [*recipe_names(), *recipe_names("tables/"), *recipe_names("adaptation/")]


def find_recipe(name: str) -> AnyRecipe:
    """Load a recipe by name, or by path when it ends in ``.yaml``."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        remedy = (
            "`python -m flows recipes` lists the recipes. Relative paths start at the working "
            "directory, those of a deployment at the checkout of its worker."
        )
        shown = f"{name}, that is {path.resolve()}"
        require(path.is_file(), ConfigError, "a recipe file must exist", shown, remedy)
    else:
        known, path = all_names(), RECIPES / f"{name}.yaml"
        rule = f"recipe must be one of {', '.join(known)}, or a path ending in .yaml"
        remedy = did_you_mean(name, known) or "`python -m flows recipes` describes them."
        require(name in known, ConfigError, rule, name, remedy)
    recipe = load_any_recipe(path)
    _check(recipe)
    return recipe


def _check(recipe: AnyRecipe) -> None:
    """Refuse tasks and settings that are not known or do not fit the corpus."""
    if isinstance(recipe, Recipe):
        tasks = [TASKS.find(name) for name in recipe.tasks]
        adapts = any(cell.adapt for cell in recipe.cells)
        for task in tasks if "tasks" in recipe.model_fields_set else tasks[: int(adapts)]:
            fits = task.corpus in (None, *corpus_kinds(recipe.corpus))
            rule = f"the task {task.name} needs a corpus of kind {task.corpus}"
            remedy = "Name tasks that fit the corpus, or adapt no cell."
            require(fits, ConfigError, rule, recipe.corpus.kind, remedy)
        missing = [f"no {split}" for split in SPLITS if split not in tasks[0].splits]
        rule = f"adaptation to {tasks[0].name} needs the splits {', '.join(SPLITS)}"
        remedy = "Name another task first, or adapt no cell."
        require(not (adapts and missing), ConfigError, rule, " and ".join(missing), remedy)
        if recipe.adapt is not None:
            adaptation_steps(recipe.adapt.settings)
    if isinstance(recipe, TableRecipe) and (
        any(setting.method for setting in recipe.settings)
        or any(text.methods for text in recipe.texts.values())
    ):
        from tasks.run.checks import check_settings

        check_settings(recipe)
    if isinstance(recipe, AdaptationRecipe):
        adaptation_steps(recipe.settings)
        if recipe.controls:
            from umim_core.adaptation.control import find_control  # it imports torch

            for control in recipe.controls:
                find_control(control)


def refuse_part(recipe: AnyRecipe, flow: str) -> None:
    """Refuse a part of the pipeline that is asked of a recipe without parts."""
    rule = "--flow names a part of the pipeline, and other recipes have none"
    found = f"--flow {flow} with {recipe.name}, a recipe of kind {recipe.kind}"
    has_parts = flow == "full" or isinstance(recipe, Recipe)
    require(has_parts, ConfigError, rule, found, "Leave it out; the whole recipe is run.")


def confirmed(recipe: AnyRecipe) -> TableRecipe:
    """Return a table's recipe that may run programs of a model."""
    if not isinstance(recipe, TableRecipe):
        rule = "--confirm-run-unsafe-code is for tables with a task that runs programs of a model"
        raise ConfigError(rule, f"recipe {recipe.name}", "Leave it out.")
    return recipe.model_copy(update={"confirm_run_unsafe_code": True})


def newest_report() -> Path:
    finished = (artifact_root() / "report").glob("*/manifest.json")  # written last
    pages = [path.with_name("report.html") for path in finished if path.parent.suffix == ""]
    rule, remedy = "a report must have been made", "Make one: python -m flows run embedded."
    require(bool(pages), ConfigError, rule, str(artifact_root()), remedy)
    return max(pages, key=lambda page: page.stat().st_mtime)
