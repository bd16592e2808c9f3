"""The reference of recipe fields is that of the models."""

from __future__ import annotations

from infra.scripts.recipe_fields import PAGE, page


def test_the_reference_of_recipe_fields_is_current() -> None:
    current = PAGE.read_text(encoding="utf-8") == page()
    assert current, "run python infra/scripts/recipe_fields.py"


def test_it_names_types_bounds_defaults_and_meanings() -> None:
    lines = page().splitlines()
    assert "| `tau` | integer, >= 1 | 5 | Least count of a rule. |" in lines
    assert "## Cell" in lines
