"""A ladder over a tiny backbone of three blocks: two steps, random ids full of spans."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from benchmarks.ladder.ladder_cells import Subject
from benchmarks.row_texts import RowText
from support.tiny_models import random_backbone
from umim_core.backbone.backbone import Backbone
from umim_core.config.recipe import DistillConfig
from umim_core.rules.ruleset import RuleSet

LENGTH = 12
SPANS = [(1, 2), (3, 4, 5), (6, 7, 8, 9)]
UNITS = [list(span) for span in SPANS] + [[10], [11], [12]]


def ids(seed: int, rows: int = 60) -> np.ndarray:
    """Random ids with spans of the tiny rules among them."""
    chosen = np.random.default_rng(seed).integers(0, len(UNITS), rows * LENGTH)
    return np.concatenate([UNITS[i] for i in chosen])[: rows * LENGTH].astype(np.int32)


def text(seed: int, rows: int) -> RowText:
    """Rows of such ids."""
    return RowText(str(seed), list(ids(seed, rows).reshape(rows, LENGTH)))


@cache
def three_blocks() -> Backbone:
    """A tiny Llama of three blocks."""
    return random_backbone(num_hidden_layers=3)


def subject(backbone: Backbone | None = None, **config: Any) -> Subject:
    """A ladder of two steps over a backbone of three blocks."""
    fields = {"max_steps": 2, "batch_size": 3, "learning_rate": 0.05, "bf16": False}
    return Subject(
        three_blocks() if backbone is None else backbone,
        RuleSet.from_spans(SPANS),
        None,
        text(0, 6),
        text(1, 4),
        DistillConfig.model_validate(fields | config),
        batch_size=4,
    )
