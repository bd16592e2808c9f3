"""Recipes of any kind, told apart by their field ``kind``."""

from __future__ import annotations

from pathlib import Path

from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.config.recipe import Recipe
from umim_core.config.recipe_files import read_recipe_file, validated
from umim_core.config.table_recipe import TableRecipe

AnyRecipe = Recipe | TableRecipe | AdaptationRecipe


def load_any_recipe(path: Path) -> AnyRecipe:
    """Read and validate a recipe of any kind."""
    raw = read_recipe_file(path)
    kind = raw.get("kind") if isinstance(raw, dict) else None
    models: dict[str, type[AnyRecipe]] = {"adaptation": AdaptationRecipe, "table": TableRecipe}
    return validated(models.get(str(kind), Recipe), raw, path.name)
