"""Model cards tell every form of module and rules, with the parameters it really has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from docs.make.cards import docs_card
from support.merge_modules import give_rows
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.recipe import Recipe
from umim_core.merging.module import MergeModule
from umim_core.rules.ruleset import RuleSet

ROOT = Path(__file__).resolve().parents[2]
FORMS = [
    ({}, "attention pooling, d 16, 4 heads, positions `none`"),
    ({"positions": "learned"}, "attention pooling, d 16, 4 heads, positions `learned`"),
    ({"depth": 3}, "2 layers of self-attention over the span, then attention pooling"),
    ({"depth": 3, "positions": "learned"}, "then attention pooling, d 16"),
    ({"kind": "linear"}, "one linear layer over the span's embeddings side by side, d 16"),
    ({"residual": "last"}, "positions `none`, last residual, "),
    ({"rule_rows": 2}, "positions `none`, 2 rule rows, "),
]


def checkpoint(rules: RuleSet, **form: Any) -> Checkpoint:
    rows = form.get("rule_rows", 0)
    module = MergeModule(16, 4, **{name: form[name] for name in form if name != "rule_rows"})
    if rows:
        give_rows(module, [(1, 2 + row) for row in range(rows)])
    placed = form.get("positions", "none")
    fields = {"hidden_size": 16, "num_heads": 4, "module_positions": placed, "depth": 1}
    fields |= {
        "kind": "attention",
        "residual": "none",
        "rule_rows": 0,
        "unit_positions": "compact",
        "training": {"steps": 7, "best_step": 5},
    }
    return SimpleNamespace(rules=rules, module=module, config=SimpleNamespace(**fields | form))


def recipe(**distill: object) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "other",
            "corpus": {"kind": "docstrings"},
            "segment_length": 96,
            "cells": [{"backbone": "b"}],
            "distill": {"max_steps": 7} | distill,
            "cluster": {"workers": 2},
        }
    )


@pytest.mark.parametrize(("form", "words"), FORMS, ids=lambda value: str(value)[:30])
def test_a_card_names_form_and_parameters(form: dict[str, Any], words: str) -> None:
    results = json.loads((ROOT / "docs/results/shipped.json").read_text("utf-8"))
    metrics = results["checkpoints"]["umim-docs-llama"]
    made = checkpoint(RuleSet.from_spans([(1, 2)]), **form)
    text = docs_card("tiny", made, recipe(), results, metrics)
    assert words in text
    parameters = sum(p.numel() for p in made.module.parameters())
    line = next(line for line in text.splitlines() if line.startswith("- **Module**"))
    (terms,) = re.findall(r"\((\d+)d² \+ (\d+)d(?: \+ (\d+)d)?\)", line)
    assert int(terms[0]) * 16**2 + (int(terms[1]) + int(terms[2] or 0)) * 16 == parameters
    assert f"{parameters:,} parameters" in line
