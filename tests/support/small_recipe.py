"""The recipe of a real, short pipeline: one cell, two steps, a corpus of three packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

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


def write_recipe(path: Path, **fields: object) -> Path:
    """Write it under the name of the file, with fields of a test's own."""
    path.write_text(yaml.safe_dump({**RECIPE, "name": path.stem, **fields}), encoding="utf-8")
    return path
