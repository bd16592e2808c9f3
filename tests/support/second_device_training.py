"""Training on the second device; ``test_second_device.py`` runs it in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.engine_matrix import CONFIGS, VOCAB, tiny_backbone
from support.merge_modules import FORMS, module_of
from support.second_device import DEVICE, moved, second_device
from support.trained_controls import KINDS, disturb
from tasks.training.strategies import DdpStrategy
from umim_core.adaptation.choices import EncodedQuestion
from umim_core.adaptation.control import fresh_control
from umim_core.adaptation.preference import ending_scores
from umim_core.backbone.backbone import Backbone
from umim_core.config.form import UnitPositions
from umim_core.config.recipe import PreferenceConfig, TrainConfig
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.merging.packing import Segmentation
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.training.objectives import DistillObjective, PreferenceObjective
from umim_core.training.packed_trunk import PackedTrunk
from umim_core.training.step import DistillModel
from umim_core.training.token_rows import TokenRows
from umim_core.training.train_loop import train

SIZE = 32
UNITS = [[2, 1, 1], [1, 1, 3], [1, 2, 3, 4, 1, 1, 1], [4], [1, 1, 1, 1], [1]]


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    with second_device():  # before the first backward pass, be it the CPU's
        pass


def backbone_of(family: str, dtype: torch.dtype) -> Backbone:
    return tiny_backbone(CONFIGS[family](), VOCAB, dtype, "sdpa")


def batch() -> tuple[list[np.ndarray], list[Segmentation]]:
    rng = np.random.default_rng(2)
    lengths = [np.array(row, dtype=np.int64) for row in UNITS]
    rows = [rng.integers(0, VOCAB, int(row.sum())) for row in lengths]
    return rows, [(np.cumsum(row) - row, row) for row in lengths]


def step(
    backbone: Backbone, module: MergeModule, unit_positions: UnitPositions
) -> tuple[Tensor, Tensor]:
    """Loss and KL, and the gradient of the loss by every parameter in one vector, on the CPU."""
    loss = DistillModel(MergedModel(backbone, module, None, unit_positions))(*batch())
    loss.total.backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    assert {gradient.device for gradient in gradients} == {backbone.device}
    values = torch.stack([loss.total.detach(), loss.kl.detach()])
    return values.cpu(), torch.cat([gradient.flatten() for gradient in gradients]).cpu()


def both_steps(
    family: str, dtype: torch.dtype, form: str = "paper", positions: UnitPositions = "compact"
) -> list[tuple[Tensor, Tensor]]:
    found = []
    for device in ("cpu", DEVICE):
        backbone, module = backbone_of(family, dtype), module_of(form, SIZE)
        module.requires_grad_()
        if device == "cpu":
            found.append(step(backbone, module, positions))
            continue
        with second_device():
            moved(backbone.model)
            moved(module)
            found.append(step(backbone, module, positions))
    return found


@pytest.mark.parametrize(
    ("family", "form", "positions"),
    [
        ("gpt2", "paper", "compact"),
        ("gpt-neox", "paper", "compact"),
        ("qwen2", "paper", "compact"),
        ("llama", "paper", "preserved"),
        *(("llama", form, "compact") for form in FORMS),
    ],
)
def test_a_distillation_step_equals_that_of_the_cpu(
    family: str, form: str, positions: UnitPositions
) -> None:
    (values, gradient), found = both_steps(family, torch.float32, form, positions)
    assert float(gradient.abs().max()) > 1e-3
    torch.testing.assert_close(found[0], values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1], gradient, atol=1e-5, rtol=1e-4)


def test_rows_are_padded_on_a_gpu_and_taken_apart_on_a_cpu() -> None:
    """A launch for every row, and with cuDNN a plan for every length, took longer than padding."""

    def batches(backbone: Backbone, lengths: list[int]) -> set[int]:
        trunk, sizes = PackedTrunk(backbone), []
        units = backbone.embed(torch.ones(sum(lengths), dtype=torch.int64, device=backbone.device))
        hook = backbone.trunk.register_forward_pre_hook(
            lambda _, __, options: sizes.append(len(options["inputs_embeds"])), with_kwargs=True
        )
        trunk.hidden(units, lengths)
        hook.remove()
        return set(sizes)

    backbone = backbone_of("llama", torch.float32)
    assert batches(backbone, [2, 3, 4]) == {1}
    with second_device():
        moved(backbone.model)
        assert batches(backbone, [2, 3, 4]) == {3}


def rows(count: int, seed: int) -> TokenRows:
    ids = np.random.default_rng(seed).integers(3, VOCAB, (count, 12))
    ids[:, 2:4] = (1, 2)
    return TokenRows.of_rows(ids.tolist(), [12] * count)


def questions(count: int) -> list[EncodedQuestion]:
    rng = np.random.default_rng(1)
    found = []
    for index in range(count):
        context = np.concatenate([[1, 2], rng.integers(3, VOCAB, 5), [1, 2]])
        endings = tuple(rng.integers(3, VOCAB, 2 + choice) for choice in range(3))
        found.append(EncodedQuestion(context, endings, index % 3))
    return found


SETTINGS: dict[str, Any] = {
    "max_steps": 4,
    "batch_size": 2,
    "learning_rate": 1e-2,
    "validate_every": 2,
    "checkpoint_every": 1,
    "patience": 100,
}


def trained(
    config: TrainConfig, folder: Path, device: str, stop_at: int | None = None
) -> dict[str, Tensor]:
    """Train, resuming, and return the best weights."""
    backbone, module = backbone_of("llama", torch.float32), module_of("paper", SIZE)
    module.requires_grad_()
    if device != "cpu":
        moved(backbone.model)
        moved(module)
    matcher = Matcher(RuleSet.from_spans([(1, 2)]))
    objective = (
        PreferenceObjective(
            module,
            MergedModel(backbone, module, matcher, "compact"),
            questions(5),
            questions(3),
            reference=folder / "reference",
            beta=0.1,
            batch_size=2,
        )
        if isinstance(config, PreferenceConfig)
        else DistillObjective(
            MergedModel(backbone, module, matcher, "compact"),
            rows(5, 0),
            rows(3, 1),
            bf16=False,
            batch_size=2,
        )
    )

    def note(progress: Any, _: int) -> None:
        if progress.step == stop_at:
            raise InterruptedError

    strategy = DdpStrategy(objective, config)
    result = train(objective, strategy, config, seed=7, state_dir=folder, on_step=note)
    assert {str(value.device) for value in result.weights.values()} == {device}
    assert {str(value.device) for value in module.parameters()} == {device}
    return {name: value.cpu() for name, value in result.weights.items()}


@pytest.mark.parametrize(
    "config",
    [TrainConfig(**SETTINGS), PreferenceConfig(**SETTINGS)],
    ids=["distillation", "preference"],
)
def test_a_run_resumed_on_the_device_ends_as_on_the_cpu(
    config: TrainConfig, tmp_path: Path
) -> None:
    expected = trained(config, tmp_path / "cpu", "cpu")
    with second_device():
        with pytest.raises(InterruptedError):
            trained(config, tmp_path / "second", DEVICE, stop_at=2)
        found = trained(config, tmp_path / "second", DEVICE)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_control_scores_as_on_the_cpu_and_the_generator_stays(kind: str) -> None:
    backbone = backbone_of("llama", torch.float32)
    control = fresh_control(kind, backbone, seed=5)
    disturb(control.module)
    with torch.no_grad():
        expected = torch.cat(ending_scores(questions(4), control.merged_model))
    with second_device(), torch.no_grad():
        moved(backbone.model)
        state = torch.get_rng_state()
        found = fresh_control(kind, backbone, seed=5)
        assert torch.equal(torch.get_rng_state(), state)
        assert {str(value.device) for value in found.module.parameters()} == {DEVICE}
        for own, other in zip(found.module.parameters(), control.module.parameters(), strict=True):
            own.copy_(other)
        got = torch.cat(ending_scores(questions(4), found.merged_model)).cpu()
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
