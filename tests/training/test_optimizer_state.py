"""The optimiser's part of a resume state: where it lands, and what is refused."""

from __future__ import annotations

import pytest
import torch

from umim_core.errors import ArtifactError
from umim_core.training.optimizer import load_optimizer_tensors

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
