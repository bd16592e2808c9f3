"""The control of the ladder: its blocks get gradients and move, the teacher stays as it was."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.ladder.ladder_cells import LadderStrategy, Subject, token_rows
from benchmarks.ladder.ladder_rows import LadderRow, ladder
from benchmarks.ladder.unfrozen_blocks import UnfrozenObjective, blocks_of, with_trained_blocks
from support.tiny_ladder import TERMS, subject
from support.tiny_models import random_backbone
from umim_core.backbone.backbone import Backbone
from umim_core.distill.objectives import DistillObjective
from umim_core.merging.compressed import Compressed


def digests(module: nn.Module) -> dict[str, str]:
    """SHA-256 of every weight."""
    return {
        name: hashlib.sha256(weight.detach().contiguous().view(torch.uint8).numpy()).hexdigest()
        for name, weight in module.named_parameters()
    }


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: w.grad for name, w in module.named_parameters() if w.grad is not None}


def control(own: Subject, row: LadderRow) -> tuple[UnfrozenObjective, Backbone, Compressed]:
    """Objective, student and start of a control."""
    compressed, rows = own.fresh(row, 0), token_rows(own.train.rows)
    student = with_trained_blocks(own.backbone, row.blocks)
    terms, bf16 = row.terms, own.config.bf16
    made = UnfrozenObjective(
        compressed, student, rows, rows, bf16=bf16, batch_size=3, hidden_terms=terms
    )
    return made, student, compressed


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_control_moves_its_end_blocks_and_nothing_else_of_the_backbone(
    family: str, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = subject(random_backbone(family, num_hidden_layers=3), bf16=bf16)
    students: list[Backbone] = []

    def noted(backbone: Backbone, blocks: tuple[int, ...]) -> Backbone:
        students.append(with_trained_blocks(backbone, blocks))
        return students[-1]

    monkeypatch.setattr("benchmarks.ladder.ladder_cells.with_trained_blocks", noted)
    before = digests(own.backbone.model)
    row = ladder(1)["paper-unfrozen"]
    found = own.train_and_measure(row, 0, print)
    assert digests(own.backbone.model) == before
    (student,) = students
    after = digests(student.model)
    blocks = [name for name, _ in student.model.named_modules() if name.endswith((".0", ".2"))]
    ends = {name for name in before if any(name.startswith(f"{block}.") for block in blocks)}
    assert {name for name in before if after[name] != before[name]} == ends
    frozen = own.train_and_measure(replace(row, blocks=()), 0, print)
    assert found["batches"] == frozen["batches"]
    assert found["row_counts"] == frozen["row_counts"]
    assert found["kl"] != pytest.approx(frozen["kl"], rel=1e-3)


def test_before_the_first_step_the_control_has_the_librarys_loss_and_gradient() -> None:
    own = subject(random_backbone(num_hidden_layers=3, dtype=torch.float64))
    row = LadderRow("", None, ladder(1)["together"].policies, TERMS, (0, -1))
    ours, student, start = control(own, row)
    compressed, rows = own.fresh(row, 0), token_rows(own.train.rows)
    theirs = DistillObjective(compressed, rows, rows, bf16=False, batch_size=3, hidden_terms=TERMS)
    with torch.no_grad():
        for module in (start.require_module(), compressed.require_module()):
            module.norm_o.weight.fill_(0.3)  # a residual begins without the module
    losses = [objective([0, 1, 2]) for objective in (ours, theirs)]
    for loss in losses:
        loss.total.backward()
    assert losses[0].total.item() == pytest.approx(losses[1].total.item(), rel=1e-6)
    assert losses[0].weight == losses[1].weight > 0
    found, expected = (gradients(x.require_module()) for x in (start, compressed))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name].to_dense(), gradient.to_dense(), rtol=1e-4, atol=1e-6
        )
    assert not gradients(compressed.backbone.model)
    trained = {name for name, w in student.model.named_parameters() if w.requires_grad}
    assert gradients(student.model).keys() == trained


def test_blocks_step_at_a_share_of_the_rate() -> None:
    """The first step of AdamW, whose gradient is the same, is as long as its rate."""
    row, moved = ladder(1)["paper-unfrozen"], []
    for rate, block_rate in ((0.05, 0.25), (0.0125, 1.0)):
        own = subject(learning_rate=rate)
        objective, student, _ = control(own, row)
        blocks = [weight for weight in student.model.parameters() if weight.requires_grad]
        before = [weight.detach().clone() for weight in blocks]
        strategy = LadderStrategy(objective, own.config, blocks, block_rate)
        strategy.update(strategy.loss([0, 1, 2]).total, rate)
        moved.append([weight.detach() - old for weight, old in zip(blocks, before, strict=True)])
        assert all(bool(step.any()) for step in moved[-1])
    torch.testing.assert_close(*moved, rtol=1e-3, atol=1e-6)


def test_the_gradient_by_a_block_is_the_slope_of_the_loss() -> None:
    # Llama's norms compute in float32, those of GPT-2 in float64.
    own = subject(random_backbone("gpt2", torch.float64, num_hidden_layers=3))
    row = LadderRow("", None, terms=TERMS, blocks=(0, -1))
    objective, student, start = control(own, row)
    start.require_module().double()
    objective([0, 1, 2]).total.backward()
    for index in (0, -1):
        weight = next(blocks_of(student.model)[index].parameters())
        assert weight.grad is not None
        direction, step = weight.grad / weight.grad.norm(), 1e-4
        values = []
        for side in (1.0, -1.0):
            with torch.no_grad():
                weight += side * step * direction
                values.append(objective([0, 1, 2]).total.item())
                weight -= side * step * direction
        slope = (values[0] - values[1]) / (2 * step)
        assert slope == pytest.approx(float(weight.grad.norm()), rel=1e-6)
