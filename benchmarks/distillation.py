"""Sides of distillation: the loss of a head, ours, plain and Liger's, and our whole step."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.subjects import Ids
from umim_core.backbone.shape import BackboneShape
from umim_core.merging.packing import Segmentation
from umim_core.training.loss import DEFAULT_CHUNK, distill_loss
from umim_core.training.step import DistillModel

OURS, PLAIN, LIGER = "ours", "plain", "Liger"
HAS_LIGER: Final = importlib.util.find_spec("liger_kernel") is not None
Result = tuple[float, Tensor]  # mean loss, gradient
Side = Callable[[], Result]


@dataclass(frozen=True)
class Shape:
    """Aligned rows R, hidden size d and vocabulary V of a loss."""

    rows: int
    hidden: int
    vocab: int


def loss_sides(shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, Side]:
    """Return every side's mean KL(teacher || student) and its gradient by the student [R, d]."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    weight = (normal(shape.vocab, shape.hidden) * (2.0 * shape.hidden**-0.5)).to(dtype)
    states = normal(shape.rows, shape.hidden)
    student = (states + 0.3 * normal(shape.rows, shape.hidden)).to(dtype)
    teacher = states.to(dtype)

    def side(mean: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Side:
        """Return the loss to show, and the gradient of the loss to train by."""

        def run() -> Result:
            leaf = student.clone().requires_grad_()
            shown, loss = mean(leaf)
            (gradient,) = torch.autograd.grad(loss, leaf)
            return float(shown.detach()), gradient

        return run

    def ours(leaf: Tensor) -> tuple[Tensor, Tensor]:
        head = SimpleNamespace(head_weight=weight, head_bias=None)
        loss = distill_loss(leaf, teacher, head)
        return loss.kl / shape.rows, loss.total / shape.rows

    def plain(leaf: Tensor) -> tuple[Tensor, Tensor]:
        """Hold all logits of both, as one writes it first."""
        logs = [F.linear(states, weight).float().log_softmax(-1) for states in (leaf, teacher)]
        loss = F.kl_div(*logs, reduction="sum", log_target=True) / shape.rows
        return loss, loss

    def liger(leaf: Tensor) -> tuple[Tensor, Tensor]:
        from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDFunction

        labels = torch.zeros(shape.rows, dtype=torch.int64, device=device)
        head = (leaf, weight, teacher, weight, labels, None, None)
        on_gpu = device.type != "cpu"  # there it is compiled, as its authors mean it
        options = (0.0, 1.0, 0.0, -100, 1.0, on_gpu, DEFAULT_CHUNK["gpu" if on_gpu else "cpu"])
        loss = LigerFusedLinearJSDFunction.apply(*head, *options)
        return loss, loss

    found = {OURS: side(ours), PLAIN: side(plain)}
    return found | ({LIGER: side(liger)} if HAS_LIGER else {})


@dataclass(frozen=True)
class StepBatch:
    """Rows, cut into units, and what trains on them."""

    model: DistillModel
    rows: list[Ids]
    cuts: list[Segmentation]

    def step(self) -> Result:
        """Return the mean KL of a step and the gradient of the module's weights."""
        loss = self.model(self.rows, self.cuts)
        parameters = list(self.model.module.parameters())
        gradients = torch.autograd.grad(loss.total / loss.weight, parameters)
        return float(loss.kl) / loss.weight, torch.cat([part.flatten() for part in gradients])

    def flops(self) -> float:
        """Return the work of a step's products, those of the merge module left out: they are few.

        A teacher forward, the student's and its gradient by the inputs, causal attention, and three
        products with the head.
        """
        shape = BackboneShape.of_model(self.model.backbone.model)
        raw = sum(map(len, self.rows))
        units = sum(len(starts) for starts, _ in self.cuts)
        # The student's rows are shorter.
        per_unit = 2.0 * shape.layers * shape.query_width * len(self.rows[0])
        attention = per_unit * raw + 3.0 * per_unit * units**2 / raw
        products = shape.block_weights * (2.0 * raw + 4.0 * units)
        return products + attention + 6.0 * units * shape.head_weights
