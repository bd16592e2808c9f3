"""AdamW of rule rows against torch's, and where the optimiser's part of a resume state lands."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from umim_core.errors import ArtifactError
from umim_core.training.optimizer import RowAdamW, load_optimizer_tensors

BETAS = (0.9, 0.999)


def test_every_row_moves_as_if_it_were_trained_alone(torch_rng: torch.Generator) -> None:
    start = torch.randn(5, 3, generator=torch_rng, dtype=torch.float64)
    table, alone = nn.Parameter(start.clone()), [nn.Parameter(row.clone()) for row in start]
    ours = RowAdamW(table, BETAS)
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
    ours = RowAdamW(table, BETAS)
    looked_up = nn.functional.embedding(torch.tensor([3, 1, 3, 0]), table, sparse=True)
    (looked_up * torch.tensor([[1.0], [2.0], [4.0], [0.0]])).sum().backward()
    rows, gradient = ours.take_gradient()
    assert (rows.tolist(), gradient.tolist()) == ([1, 3], [[2.0, 2.0], [5.0, 5.0]])
    assert table.grad is None
    assert [len(part) for part in ours.take_gradient()] == [0, 0]


def test_another_tables_state_is_refused() -> None:
    ours, other = (RowAdamW(nn.Parameter(torch.zeros(k, 2)), BETAS) for k in (3, 4))
    with pytest.raises(ArtifactError, match="must fit its rule rows; got exp_avg: \\(4, 2\\)"):
        ours.load(other.tensors())
    with pytest.raises(ArtifactError, match="exp_avg: None"):
        ours.load({})


MOMENTS = {
    "optimizer.0.exp_avg": torch.ones(3),
    "optimizer.0.exp_avg_sq": torch.ones(3),
    "optimizer.0.step": torch.tensor(2.0),
}


def _adamw(device: str = "cpu") -> tuple[torch.optim.AdamW, torch.nn.Parameter]:
    parameter = torch.nn.Parameter(torch.zeros(3, device=device))
    return torch.optim.AdamW([parameter]), parameter


def test_moments_land_on_the_parameters_device_and_the_step_stays() -> None:
    optimizer, parameter = _adamw("meta")  # any device other than that of the file
    load_optimizer_tensors(optimizer, MOMENTS)
    state = optimizer.state[parameter]
    assert {name: value.device.type for name, value in state.items()} == {
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
        "step": "cpu",
    }


def test_a_state_saved_before_the_first_step_loads() -> None:
    optimizer, parameter = _adamw()
    load_optimizer_tensors(optimizer, {})
    assert parameter not in optimizer.state


@pytest.mark.parametrize("missing", sorted(MOMENTS))
def test_a_partial_state_is_refused(missing: str) -> None:
    optimizer, _ = _adamw()
    kept = {name: value for name, value in MOMENTS.items() if name != missing}
    with pytest.raises(ArtifactError, match="must fit its optimiser"):
        load_optimizer_tensors(optimizer, kept)


def test_a_state_of_another_shape_is_refused() -> None:
    optimizer, _ = _adamw()
    with pytest.raises(ArtifactError, match="must fit its optimiser"):
        load_optimizer_tensors(optimizer, MOMENTS | {"optimizer.0.exp_avg": torch.ones(4)})
