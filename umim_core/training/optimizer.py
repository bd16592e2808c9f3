"""Optimisation: the interface of strategies, AdamW in one process, its tensors, the schedule.

Strategies of several ranks (DDP, ZeRO-2) take the same loss scaled by world / global weight, clip
once to the same norm and use the same AdamW; the loop sets the learning rate of every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from umim_core.config.recipe import DistillConfig, TrainConfig
from umim_core.errors import ArtifactError, require
from umim_core.merging.rule_rows import RuleRows
from umim_core.training.loss import BatchLoss

BETAS: Final = (0.9, 0.999)  # of AdamW
_MOMENTS: Final = ("exp_avg", "exp_avg_sq", "step")
_EPSILON: Final = 1e-8
_AFRESH: Final = "Remove the partial directory to start this stage afresh."


def rule_rows(objective: nn.Module) -> tuple[str, RuleRows] | None:
    """Return the rule rows that an objective trains, with their name; None without any."""
    for name, module in objective.named_modules():
        if isinstance(module, RuleRows) and module.table.requires_grad:
            return name, module
    return None


class RowAdamW:
    """AdamW by rows [K, d], whose gradients are sparse, without weight decay.

    Source: AdamW; torch's SparseAdam, which counts steps for all rows together.
    """

    def __init__(self, table: nn.Parameter) -> None:
        self.table = table
        self._state = {
            "exp_avg": torch.zeros_like(table, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(table, requires_grad=False),
            "steps": torch.zeros(len(table), dtype=torch.int64, device=table.device),
        }

    def take_gradient(self) -> tuple[Tensor, Tensor]:
        """Return the rows [U] (int64, ascending) with a gradient and it [U, d]; it is cleared.

        Rows whose gradient is zero are none of them: lookups of spans without a row give such.
        """
        gradient, self.table.grad = self.table.grad, None
        if gradient is None:
            nothing = self.table.new_zeros(0, self.table.shape[1])
            return torch.zeros(0, dtype=torch.int64, device=nothing.device), nothing
        summed = gradient.coalesce()
        rows, values = summed.indices()[0], summed.values()
        moved = (values != 0).any(dim=1)
        return rows[moved], values[moved]

    @torch.no_grad()
    def step(self, rows: Tensor, gradient: Tensor, learning_rate: float) -> None:
        """Move some rows [U] (int64), different ones, by their gradient [U, d]."""
        first, second = BETAS
        means, squares, counts = self._state.values()
        mean = means[rows].lerp_(gradient, 1.0 - first)
        square = squares[rows].lerp_(gradient * gradient, 1.0 - second)
        steps = counts[rows] + 1
        means[rows], squares[rows], counts[rows] = mean, square, steps
        taken = steps[:, None].to(torch.float64)
        mean = mean / (1.0 - first**taken).to(mean.dtype)
        scale = (square / (1.0 - second**taken).to(square.dtype)).sqrt_().add_(_EPSILON)
        self.table[rows] -= learning_rate * (mean / scale)

    def tensors(self) -> dict[str, Tensor]:
        return {f"optimizer.rows.{name}": value for name, value in self._state.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        for name, value in self._state.items():
            tensor = tensors.get(f"optimizer.rows.{name}")
            shape = None if tensor is None else tuple(tensor.shape)
            rule = "a resume state must fit its rule rows"
            require(shape == value.shape, ArtifactError, rule, f"{name}: {shape}", _AFRESH)
            value.copy_(tensors[f"optimizer.rows.{name}"])


class Strategy(Protocol):
    """One optimiser step, and the optimiser's tensors."""

    def loss(self, indices: Sequence[int]) -> BatchLoss:
        """Run the objective through the wrapper that exchanges gradients."""

    def update(self, scaled: Tensor, learning_rate: float) -> float:
        """Back-propagate, clip, step; return the gradient norm before clipping.

        A norm that is not finite is returned, and nothing is changed.
        """

    def tensors(self) -> dict[str, Tensor]: ...

    def load(self, tensors: dict[str, Tensor]) -> None: ...


def adamw(objective: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Return the optimiser of what an objective trains, rule rows excepted."""
    rows = rule_rows(objective)
    trainable = [
        parameter
        for parameter in objective.parameters()
        if parameter.requires_grad and (rows is None or parameter is not rows[1].table)
    ]
    return torch.optim.AdamW(
        trainable,
        lr=config.learning_rate,
        betas=BETAS,
        weight_decay=config.weight_decay,
        foreach=False,
    )


def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def set_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


class AdamWStrategy:
    """AdamW in this process; rule rows have one of their own (``RowAdamW``).

    ``wrapped`` runs in the objective's place and exchanges gradients; None is the objective itself.
    """

    def __init__(
        self, objective: nn.Module, config: TrainConfig, wrapped: nn.Module | None = None
    ) -> None:
        self._clip = config.clip_norm
        self._optimizer = adamw(objective, config)
        self._parameters = parameters(self._optimizer)
        self._model = objective if wrapped is None else wrapped
        rows = rule_rows(objective)
        self._rows = None if rows is None else RowAdamW(rows[1].table)
        self._row_rate = config.row_rate if isinstance(config, DistillConfig) else 1.0

    def loss(self, indices: Sequence[int]) -> BatchLoss:
        loss: BatchLoss = self._model(indices)
        return loss

    def update(self, scaled: Tensor, learning_rate: float) -> float:
        set_rate(self._optimizer, learning_rate)
        scaled.backward()  # type: ignore[no-untyped-call]  # theirs
        clipped = list(self._parameters)
        if self._rows is not None:
            rows, gradient = self.exchange_rows(*self._rows.take_gradient())
            part = nn.Parameter(torch.empty_like(gradient))  # for the table, whose gradient is
            part.grad = gradient  # sparse: clipping counts it and scales it
            clipped.append(part)
        norm = float(nn.utils.clip_grad_norm_(clipped, self._clip))
        if math.isfinite(norm):  # the same on every rank: gradients are averaged by now
            self._optimizer.step()
            if self._rows is not None:
                self._rows.step(rows, gradient, learning_rate * self._row_rate)
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def exchange_rows(self, rows: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows [U] and their gradient [U, d] as all ranks see them; one has its own."""
        return rows, gradient

    def tensors(self) -> dict[str, Tensor]:
        rows = {} if self._rows is None else self._rows.tensors()
        return optimizer_tensors(self._optimizer) | rows

    def load(self, tensors: dict[str, Tensor]) -> None:
        load_optimizer_tensors(self._optimizer, tensors)
        if self._rows is not None:
            self._rows.load(tensors)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for index, parameter in enumerate(parameters(optimizer)):
        for name in _MOMENTS if parameter in optimizer.state else ():
            value = optimizer.state[parameter][name]
            tensors[f"optimizer.{index}.{name}"] = torch.as_tensor(value)
    return tensors


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    for index, parameter in enumerate(parameters(optimizer)):
        moments = {name: tensors.get(f"optimizer.{index}.{name}") for name in _MOMENTS}
        if all(value is None for value in moments.values()):
            continue  # saved before the first optimiser step
        for name, value in moments.items():
            if value is None or (name != "step" and value.shape != parameter.shape):
                raise ArtifactError(
                    "a resume state must fit its optimiser", f"parameter {index}, {name}", _AFRESH
                )
            device = value.device if name == "step" else parameter.device
            optimizer.state[parameter][name] = value.to(device, copy=True)


def linear_warmup_decay(step: int, total_steps: int, warmup_fraction: float = 0.1) -> float:
    """Return the factor on the peak learning rate at a step, counted from 0.

    It rises from 1/w to 1 over the w = ceil(warmup_fraction * total_steps) first steps and falls
    linearly to 1 / (total_steps - w + 1) at the last one, so that no step is wasted at rate 0.

    Source: paper, "Optimization and Distributed Training" (10 % warm-up, linear decay).
    """
    warmup = math.ceil(warmup_fraction * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    return max(0.0, (total_steps - step) / (total_steps - warmup + 1))
