"""A recipe of a mixture of two corpora, small enough to train and measure in seconds."""

from __future__ import annotations

import json
from pathlib import Path

from support.tiny_pipeline import save_backbone
from umim_core.config.corpus import SPLITS
from umim_core.config.recipe import Recipe

_PHRASES = ("Return a new array of the given shape. ", "The sum of all items along an axis. ")


def mixture_recipe(folder: Path) -> Recipe:
    """Return the recipe; its texts and its backbone are written into a folder."""
    for split in SPLITS:
        lines = "".join(f"{_PHRASES[i % 2]}{split} {i % 13}.\n" for i in range(150))
        (folder / f"manual-{split}.txt").write_text(lines, encoding="utf-8")
        notes = [json.dumps({"text": f"See {split} {i}. {_PHRASES[i % 2]}"}) for i in range(60)]
        (folder / f"notes-{split}.jsonl").write_text("\n".join(notes), encoding="utf-8")

    def part(kind: str, name: str, licence: str) -> dict[str, object]:
        found = {s: {"kind": kind, "paths": [str(folder / name.format(s))]} for s in SPLITS}
        return {"kind": "files", "licence": licence, **found}

    step = {"max_steps": 4, "batch_size": 2, "learning_rate": 0.002, "checkpoint_every": 1}
    return Recipe.model_validate(
        {
            "name": "tiny-mixture",
            "corpus": {
                "kind": "mixture",
                "max_characters": 300,
                "parts": {
                    "manual": part("text", "manual-{}.txt", "CC0-1.0"),
                    "notes": part("jsonl", "notes-{}.jsonl", "MIT"),
                },
            },
            "segment_length": 64,
            "cells": [{"backbone": str(save_backbone(folder / "backbone")), "tau": 3}],
            "distill": {**step, "validate_every": 2, "validation_rows": 4, "bf16": False},
            "task": None,
            "evaluate": {
                "alignment_rows": 3, "perplexity_rows": 3, "batch_size": 2, "segments": "spread",
            },
            "cluster": {"workers": 0},
        }
    )  # fmt: skip
