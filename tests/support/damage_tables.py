"""Damage tables of given numbers, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from umim_core.rules.damage_table import DamageOrigin, DamageTable
from umim_core.rules.ruleset import RuleSet

SPANS = [(1, 2), (3, 4), (1, 2, 3), (5, 6, 7, 8)]
ORIGIN = DamageOrigin(
    backbone="tiny",
    backbone_fingerprint="a" * 64,
    module_digest="b" * 64,
    unit_positions="compact",
    text_digest="c" * 64,
    tokens=100,
    rows=2,
    window=4,
)


def table_of(
    occurrences: Sequence[float],
    merges: Sequence[int],
    kl: Sequence[float],
    spans: Sequence[tuple[int, ...]] = SPANS,
) -> DamageTable:
    return DamageTable(RuleSet.from_spans(spans), *map(np.array, (occurrences, merges, kl)), ORIGIN)
