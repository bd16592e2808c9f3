"""Damage of rules, against forwards from scratch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from support.engine_matrix import build, from_scratch, module_for
from umim_core.errors import EvaluationError, NumericalError
from umim_core.evaluation import alignment
from umim_core.evaluation.alignment import row_metrics
from umim_core.evaluation.rule_damage import measure_damage
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.damage_table import DamageTable
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

NESTED = [
    (1, 2), (1, 2, 3, 4), (5, 6, 7), (5, 6), (8, 9, 10), (9, 10), (2, 2), (1, 2, 3, 4, 5, 6)
]  # fmt: skip
FLAT = [(1, 2, 3, 4), (5, 6, 7), (8, 9), (3, 1, 3, 1, 3, 1)]
Damage = dict[tuple[int, ...], list[float]]  # rule -> occurrences, merges, KL


def rows_of(spans: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Rows full of spans, of different lengths; the last has none."""
    rng = np.random.default_rng(0)
    parts = [np.array(span) for span in (*spans, (0,), (10,), (3, 1))]
    rows = [np.concatenate([parts[i] for i in rng.integers(0, len(parts), 9)]) for _ in range(3)]
    return [*rows, np.array([0, 10, 0])]


def compressed_of(spans: list[tuple[int, ...]]) -> MergedModel:
    backbone = build("llama")
    return MergedModel(backbone, module_for(backbone, 6), Matcher(RuleSet.from_spans(spans)))


def by_rule(table: DamageTable) -> Damage:
    spans = [tuple(ids) for n in table.rules.orders for ids in table.rules.ids_by_order[n].tolist()]
    values = zip(table.occurrences, table.merges, table.kl, strict=True)
    return {span: list(map(float, found)) for span, found in zip(spans, values, strict=True)}


def by_hand(merged_model: MergedModel, rows: list[np.ndarray], window: int) -> Damage:
    """The rule of the module's docstring, one forward a state."""
    backbone, matcher = merged_model.backbone, merged_model.require_matcher()
    found: Damage = {
        tuple(ids): [0.0, 0.0, 0.0]
        for n in matcher.rules.orders
        for ids in matcher.rules.ids_by_order[n].tolist()
    }
    for row in rows:
        whole = set(zip(*(part.tolist() for part in matcher.segment(row)), strict=True))
        for t in range(len(row)):
            prefix = row[: t + 1]
            units = list(zip(*(part.tolist() for part in matcher.segment(prefix)), strict=True))
            start, length = units[-1]
            if length > 1:
                rule = tuple(prefix[start:].tolist())
                found[rule][0] += 1
                found[rule][1] += (start, length) in whole
            merged = [unit for unit in units[-window:] if unit[1] > 1]
            if not merged:
                continue
            start, length = merged[-1]
            prompt = (matcher, [prefix.tolist()])
            ((student, _),) = from_scratch(backbone, merged_model.module, [prompt])
            teacher = backbone.model(torch.tensor(prefix)[None]).logits[0, -1]
            kl = row_metrics(teacher[None], student[None])["kl"]
            found[tuple(prefix[start : start + length].tolist())][2] += float(kl)
    return found


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("spans", [NESTED, FLAT])
@torch.no_grad()
def test_every_state_goes_to_its_last_merge_within_the_window(
    spans: list[tuple[int, ...]], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(alignment._HEAD_ROWS, "cpu", 7)  # several chunks of logits a batch
    merged_model, rows = compressed_of(spans), rows_of(spans)
    found = by_rule(measure_damage(rows, merged_model, window=window, batch_size=2))
    wanted = by_hand(merged_model, rows, window)
    assert found.keys() == wanted.keys()
    for rule, values in wanted.items():
        assert found[rule] == pytest.approx(values, abs=1e-9), rule
    hidden = sum(occurrences - merges for occurrences, merges, _ in found.values())
    assert (hidden > 0) is (spans is NESTED)


def test_what_cannot_be_measured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    merged_model = compressed_of(FLAT)
    for rows in ([], [np.array([0, 10, 0])]):
        with pytest.raises(EvaluationError, match=f"some rule must match .* {len(rows)} rows"):
            measure_damage(rows, merged_model)
    merged_model.require_module().norm_o.weight.fill_(math.nan)
    with pytest.raises(NumericalError, match="every divergence must be finite"):
        measure_damage(rows_of(FLAT), merged_model)
    with monkeypatch.context() as patched, pytest.raises(AssertionError):
        places = RuleSet.places  # those of other rules
        patched.setattr(RuleSet, "places", lambda self, spans: places(self, spans)[::-1])
        measure_damage(rows_of(NESTED), compressed_of(NESTED))
