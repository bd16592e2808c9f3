"""Options of rules: what goes together, wherever they come from; forms are read back as dumped."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from support.merge_modules import FORMS
from support.small_recipe import least_recipe
from umim_core.config.form import ModuleForm
from umim_core.config.recipe import Cell, Recipe
from umim_core.config.rule_options import AS_FOUND, RuleOptions
from umim_core.errors import ConfigError

CONFIDENT = {"source": "confidence"}
REFUSED = {
    "segment": ({"segment_length": 1}, "segment_length must be at least 2; got 1"),
    "threads": ({"threads": 1025}, "threads must be at most 1024; got 1025"),
    "longest": ({"longest": 17}, "longest must be at most 16; got 17"),
    "confidence, longest": (CONFIDENT | {"longest": 5}, "runs of 2 to 4 tokens"),
    "memory": ({"max_memory_gib": float("inf")}, "max_memory_gib must be a finite number"),
    "unknown": ({"taus": 3}, "taus must be a known field"),
    "spans, filtered": (
        {"spans": 9, "overlap": "greedy", "tau": 3},
        r"got \{'overlap': 'greedy', 'spans': 9\}",
    ),
    "spans, confidence": (CONFIDENT | {"spans": 9}, "spans are chosen among all"),
    "confidence, documents": (CONFIDENT | {"min_documents": 2}, "know no min_documents"),
    "confidence, tokens": (CONFIDENT | {"confidence_tokens": 500}, "at least segment_length, 512"),
    "no confidence": ({"min_probability": 0.7}, "min_probability belongs to source 'conf"),
}
SHARED = ("min_documents", "max_memory_gib")  # fields of a recipe's section "mining"
NO_FIELDS_OF_A_RECIPE = ("segment", "threads")


def recipe(cell: dict[str, Any], **fields: object) -> Recipe:
    return least_recipe(cells=[{"backbone": "a", **cell}], **fields)


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        RuleOptions.model_validate(options)
    if name not in NO_FIELDS_OF_A_RECIPE:
        shared = {key: value for key, value in options.items() if key in SHARED}
        cell = {key: value for key, value in options.items() if key not in SHARED}
        with pytest.raises(ValidationError):
            recipe(cell, mining=shared)


def test_chosen_spans_and_confident_ones_of_a_recipe_are_unfiltered() -> None:
    assert RuleOptions(spans=9) == RuleOptions(spans=9, **AS_FOUND)
    confident = recipe(CONFIDENT | {"min_probability": 0.7})
    found = confident.rule_options(confident.cells[0])
    assert found == RuleOptions(source="confidence", min_probability=0.7, **AS_FOUND)
    with pytest.raises(ValidationError, match="overlap must be 'none'; leave it out"):
        recipe(CONFIDENT | {"overlap": "greedy"})


def test_a_recipe_gives_a_cell_what_its_cells_share() -> None:
    mining = {"protect": ("digits",), "min_documents": 3, "max_memory_gib": 2.0}
    found = recipe({"tau": 7}, mining=mining, segment_length=64)
    want = RuleOptions(tau=7, segment_length=64, **mining)
    assert found.rule_options(found.cells[0]) == want


def test_a_cell_has_mined_rules_or_a_directory_of_them() -> None:
    assert recipe({"rules": "x"}).cells[0].rules == "x"
    with pytest.raises(ValidationError, match="tau belongs to mining, rules are given"):
        recipe({"rules": "x", "tau": 9})
    with pytest.raises(ValidationError, match="'frequency' or 'confidence'"):
        recipe({"source": "explicit"})


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_cells_are_dumped_and_read_back(form: dict[str, Any]) -> None:
    assert ModuleForm(**form).form() == ModuleForm().form() | form
    for rules in ({}, CONFIDENT | {"min_probability": 0.7}, {"spans": 9}, {"rules": "x"}):
        cell = Cell(backbone="a", **rules, **form)
        assert Cell.model_validate_json(cell.model_dump_json()) == cell
