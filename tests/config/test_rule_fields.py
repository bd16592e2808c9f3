"""Form and rule fields of a cell: what goes together, and that older recipes read the same."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from support.merge_modules import FORMS
from umim_core.config.form import ModuleForm
from umim_core.config.recipe import Cell, Recipe

CONFIDENT = {"backbone": "a", "source": "confidence"}


def recipe(cell: dict[str, Any], **fields: object) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "small",
            "corpus": {"kind": "docstrings"},
            "cells": [cell],
            "distill": {"max_steps": 1},
            **fields,
        }
    )


def test_a_cell_with_rules_by_confidence_survives_being_saved() -> None:
    cell = Cell.model_validate({**CONFIDENT, "min_probability": 0.7, "kind": "linear"})
    assert Cell.model_validate(cell.model_dump(mode="json")) == cell


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ({**CONFIDENT, "overlap": "greedy"}, "overlap must be 'none'; leave it out"),
        ({**CONFIDENT, "rule_budget": 9}, "confidence rules know no rule_budget"),
        ({**CONFIDENT, "min_probability": 0.0}, "greater than 0"),
        ({"backbone": "a", "min_probability": 0.7}, "min_probability belongs to source 'conf"),
        ({"backbone": "a", "source": "explicit"}, "'frequency' or 'confidence'"),
    ],
)
def test_what_does_not_go_together_is_refused(cell: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Cell.model_validate(cell)


@pytest.mark.parametrize(
    ("cell", "fields", "message"),
    [
        (CONFIDENT, {"mining": {"min_documents": 2}}, "know no mining.min_documents"),
        ({**CONFIDENT, "confidence_tokens": 500}, {}, "at least segment_length, 512"),
    ],
)
def test_a_recipe_that_they_cannot_follow_is_refused(
    cell: dict[str, Any], fields: dict[str, object], message: str
) -> None:
    assert recipe(CONFIDENT).cells[0].source == "confidence"
    with pytest.raises(ValidationError, match=message):
        recipe(cell, **fields)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_is_dumped_and_read_back(form: dict[str, Any]) -> None:
    found = ModuleForm(**form)
    assert found.form() == ModuleForm().form() | form
    assert ModuleForm.model_validate_json(found.model_dump_json()) == found
