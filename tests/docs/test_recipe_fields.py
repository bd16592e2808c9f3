"""The page of recipe fields says what the models say."""

from __future__ import annotations

from docs.make.recipe_fields import page


def test_it_names_types_bounds_defaults_and_meanings() -> None:
    lines = page().splitlines()
    assert "| `tau` | integer, >= 1 | 5 | Least count of a rule. |" in lines
    assert "## Cell" in lines
