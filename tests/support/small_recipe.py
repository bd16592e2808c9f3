"""Recipes: of a real, short pipeline (one cell, two steps, three packages), and the least one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from umim_core.config.model_base import SPLITS
from umim_core.config.recipe import Recipe

RECIPE: Final[dict[str, Any]] = {
    "corpus": {
        "kind": "docstrings",
        "packages": ["numpy", "click", "requests"],
        "out_of_domain": ["mpmath"],
        "train_tokens": 20000,
    },
    "cells": [{"backbone": "umim-docs-llama", "tau": 5}],
    "segment_length": 128,
    "distill": {"max_steps": 2, "batch_size": 2, "validation_rows": 2},
    "task": {"train": 12, "valid": 4, "test": 4},
    "evaluate": {"alignment_rows": 2, "perplexity_rows": 2, "task_questions": 4, "batch_size": 2},
}


def least_recipe(**fields: object) -> Recipe:
    """Return a recipe of one cell with the fields that a recipe must have, to be planned."""
    least = {
        "name": "small",
        "corpus": {"kind": "docstrings"},
        "cells": [{"backbone": "umim-docs-llama"}],
        "distill": {"max_steps": 1},
    }
    return Recipe.model_validate(least | fields)


def files_corpus(folder: Path, text: str) -> dict[str, Any]:
    """Write a text for every split into a folder, and return the corpus of these files."""
    corpus: dict[str, Any] = {"kind": "files"}
    for split in SPLITS:
        (folder / f"{split}.txt").write_text(text, encoding="utf-8")
        corpus[split] = {"kind": "text", "paths": [str(folder / f"{split}.txt")]}
    return corpus


def write_recipe(path: Path, **fields: object) -> Path:
    """Write it under the name of the file, with fields of a test's own."""
    path.write_text(yaml.safe_dump({**RECIPE, "name": path.stem, **fields}), encoding="utf-8")
    return path
