"""Alignment of compressed with raw predictions, against forwards from scratch."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from support.engine_matrix import families, from_scratch, module_for, tiny_backbone
from support.family_configs import EXACT
from umim_core.backbone.backbone import Backbone
from umim_core.config.form import UnitPositions
from umim_core.errors import NumericalError
from umim_core.evaluation import alignment
from umim_core.evaluation.alignment import METRICS, evaluate_alignment, row_metrics
from umim_core.evaluation.paired_differences import ratio_error
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

VOCAB = 12
NESTED = [(1, 2), (1, 2, 3, 4), (5, 6, 7), (5, 6), (8, 9, 10), (9, 10)]
FLAT = [(1, 2, 3, 4), (5, 6, 7), (8, 9)]


def build(dtype: torch.dtype = torch.float64, vocab: int = VOCAB) -> Backbone:
    return tiny_backbone(families(64)["llama"](), vocab, dtype, "sdpa")


def build_with_head_bias() -> Backbone:
    """A model whose head adds a bias that is not zero."""
    backbone = tiny_backbone(EXACT["phi"](), VOCAB, torch.float64, "sdpa")
    assert backbone.head_bias is not None
    with torch.no_grad():
        backbone.head_bias.copy_(torch.linspace(-2.0, 2.0, VOCAB))
    return backbone


def random_rows() -> list[np.ndarray]:
    """Rows full of spans, of different lengths; the last has none."""
    rng = np.random.default_rng(0)
    spans = [np.array(span) for span in (*NESTED, (0,), (11,), (3, 1))]
    rows = [np.concatenate([spans[i] for i in rng.integers(0, len(spans), 12)]) for _ in range(3)]
    return [*rows, np.array([1, 2, 3, 4]), np.array([0, 11, 0])]


def joined(values: list[dict[str, Tensor]]) -> dict[str, float]:
    return {name: float(torch.cat([v[name] for v in values]).mean()) for name in METRICS}


@pytest.mark.parametrize(
    ("make", "spans", "unit_positions", "make_base"),
    [
        *product([build], [NESTED, FLAT], ["compact", "preserved"], [None]),
        (build_with_head_bias, FLAT, "compact", None),
        (build, FLAT, "compact", build_with_head_bias),
    ],
)
@torch.no_grad()
def test_both_sets_of_rows_equal_forwards_from_scratch(
    make: Callable[[], Backbone],
    spans: list[tuple[int, ...]],
    unit_positions: UnitPositions,
    make_base: Callable[[], Backbone] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(alignment._HEAD_ROWS, "cpu", 7)  # several chunks of logits a batch
    backbone, matcher, rows = make(), Matcher(RuleSet.from_spans(spans)), random_rows()
    module, other = module_for(backbone), None if make_base is None else make_base()
    base = other or backbone
    aligned, states, by_row = [], [], []
    for row in rows:
        by_row.append([])
        starts, lengths = matcher.segment(row)
        first = (lengths > 1).argmax() if lengths.max() > 1 else len(starts)
        unit_ends = set((starts + lengths - 1)[first:].tolist())
        for t in range(len(row)):
            prefix = row[: t + 1].tolist()
            if matcher.segment(row[: t + 1])[1].max() == 1:
                continue  # nothing merged yet
            parts = (backbone, module, matcher, [prefix], unit_positions)
            teacher = base.model(torch.tensor([prefix])).logits[0, -1]
            values = row_metrics(teacher[None], from_scratch(*parts)[0][None])
            states.append(values)
            aligned += [values] if t in unit_ends else []
            by_row[-1] += [values] if t in unit_ends else []
    merged_model = MergedModel(backbone, module, matcher, unit_positions)
    found = evaluate_alignment(rows, merged_model, batch_size=2, base=other)
    assert (found.aligned_rows, found.state_rows) == (len(aligned), len(states))
    assert len(aligned) < len(states)
    assert found.means == pytest.approx(joined(aligned), abs=1e-9)
    assert found.state_means == pytest.approx(joined(states), abs=1e-9)
    assert found.means["kl"] != pytest.approx(found.state_means["kl"], abs=1e-4)
    assert found.metrics()["kl_states"] == found.state_means["kl"]
    assert found.errors == pytest.approx(
        {name: ratio_error(*zip(*sums_by_row(by_row, name), strict=True)) for name in METRICS}
    )


def sums_by_row(by_row: list[list[dict[str, Tensor]]], name: str) -> list[tuple[float, int]]:
    return [(sum(float(value[name]) for value in row), len(row)) for row in by_row]


def test_weights_that_are_not_finite_are_reported() -> None:
    backbone, matcher = build(), Matcher(RuleSet.from_spans(NESTED))
    module = module_for(backbone)
    module.norm_o.weight.fill_(math.nan)
    with pytest.raises(NumericalError, match="alignment metric must be finite"):
        evaluate_alignment(random_rows(), MergedModel(backbone, module, matcher, "compact"))
