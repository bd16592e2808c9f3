"""AdamW of rule rows against torch's, the optimiser's resume state, the learning-rate schedule."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from support.tiny_training import CONFIG, SPANS, Run
from umim_core.config.recipe import DistillConfig
from umim_core.errors import ArtifactError
from umim_core.training.optimizer import (
    BETAS,
    AdamWStrategy,
    RowAdamW,
    linear_warmup_decay,
    load_optimizer_tensors,
)


def test_every_row_moves_as_if_it_were_trained_alone(torch_rng: torch.Generator) -> None:
    start = torch.randn(5, 3, generator=torch_rng, dtype=torch.float64)
    table, alone = nn.Parameter(start.clone()), [nn.Parameter(row.clone()) for row in start]
    ours = RowAdamW(table)
    theirs = [torch.optim.AdamW([row], lr=1.0, betas=BETAS, weight_decay=0.0) for row in alone]
    for step, rows in enumerate([[0, 2], [2], [0, 1, 2, 4], [1], [2, 4]]):
        rate = 0.1 / (step + 1)
        gradient = torch.randn(len(rows), 3, generator=torch_rng, dtype=torch.float64)
        ours.step(torch.tensor(rows), gradient, rate)
        for row, part in zip(rows, gradient, strict=True):
            theirs[row].param_groups[0]["lr"] = rate
            alone[row].grad = part
            theirs[row].step()
    torch.testing.assert_close(table.detach(), torch.stack([row.detach() for row in alone]))
    assert torch.equal(table[3], start[3])


def test_gradients_of_one_row_add_up_and_zeros_are_none() -> None:
    table = nn.Parameter(torch.zeros(4, 2))
    ours = RowAdamW(table)
    looked_up = nn.functional.embedding(torch.tensor([3, 1, 3, 0]), table, sparse=True)
    (looked_up * torch.tensor([[1.0], [2.0], [4.0], [0.0]])).sum().backward()
    rows, gradient = ours.take_gradient()
    assert (rows.tolist(), gradient.tolist()) == ([1, 3], [[2.0, 2.0], [5.0, 5.0]])
    assert table.grad is None
    assert [len(part) for part in ours.take_gradient()] == [0, 0]


def test_rows_count_in_the_norm_and_are_clipped_with_the_rest(tmp_path: Path) -> None:
    objective = Run(tmp_path, rule_rows=len(SPANS)).objective()
    config = DistillConfig.model_validate(CONFIG.model_dump() | {"row_rate": 3.0})
    strategy = AdamWStrategy(objective, config)
    loss = objective([0, 1, 2, 3])
    found = torch.autograd.grad(loss.total, list(objective.parameters()), retain_graph=True)
    norm = torch.stack([part.to_dense().norm() for part in found]).norm()
    assert strategy.update(loss.total, 1e-2) == pytest.approx(float(norm), rel=1e-5)
    first = strategy.tensors()["optimizer.rows.exp_avg"]  # 0.1 times the clipped gradient
    (rows,) = (part for part in found if part.is_sparse)
    want = 0.1 * rows.to_dense() * CONFIG.clip_norm / (norm + 1e-6)
    torch.testing.assert_close(first, want, rtol=1e-4, atol=1e-8)
    moved = objective.module.rows.table.detach().abs().max()
    assert float(moved) == pytest.approx(3.0 * 1e-2, rel=1e-3)  # AdamW's first step


def test_another_tables_state_is_refused() -> None:
    ours, other = (RowAdamW(nn.Parameter(torch.zeros(k, 2))) for k in (3, 4))
    with pytest.raises(ArtifactError, match="must fit its rule rows; got exp_avg: \\(4, 2\\)"):
        ours.load(other.tensors())
    with pytest.raises(ArtifactError, match="exp_avg: None"):
        ours.load({})


MOMENTS = {
    "optimizer.0.exp_avg": torch.ones(3),
    "optimizer.0.exp_avg_sq": torch.ones(3),
    "optimizer.0.step": torch.tensor(2.0),
}


def test_moments_land_on_the_parameters_device_and_the_step_stays() -> None:
    parameter = nn.Parameter(torch.zeros(3, device="meta"))  # any device but that of the file
    optimizer = torch.optim.AdamW([parameter])
    load_optimizer_tensors(optimizer, {})  # saved before the first step
    assert parameter not in optimizer.state
    load_optimizer_tensors(optimizer, MOMENTS)
    places = {name: value.device.type for name, value in optimizer.state[parameter].items()}
    assert places == {"exp_avg": "meta", "exp_avg_sq": "meta", "step": "cpu"}


def test_a_state_of_other_moments_is_refused() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(3))])
    for state in (
        *({k: v for k, v in MOMENTS.items() if k != missing} for missing in MOMENTS),
        MOMENTS | {"optimizer.0.exp_avg": torch.ones(4)},
    ):
        with pytest.raises(ArtifactError, match="must fit its optimiser"):
            load_optimizer_tensors(optimizer, state)


def factors(total: int, fraction: float) -> list[float]:
    return [linear_warmup_decay(step, total, fraction) for step in range(total)]


def test_ten_steps_with_two_of_warm_up() -> None:
    rising, falling = [1 / 2, 1.0], [step / 9 for step in range(8, 0, -1)]
    assert factors(10, 0.2) == pytest.approx(rising + falling)
    assert [linear_warmup_decay(step, 10, 0.2) for step in (10, 100)] == [0.0, 0.0]
    assert [linear_warmup_decay(step, 1000) for step in (0, 49, 99)] == [0.01, 0.5, 1.0]


@given(st.integers(1, 400), st.floats(0.0, 0.99))
def test_it_rises_to_one_then_falls_and_never_wastes_a_step(total: int, fraction: float) -> None:
    values = factors(total, fraction)
    peak = values.index(max(values))
    assert all(0.0 < value <= 1.0 for value in values)
    assert all(a < b for a, b in pairwise(values[: peak + 1]))
    assert all(a > b for a, b in pairwise(values[peak:]))
