"""AdamW of rule rows: a step moves only the rows that it has gradients for.

A rule occurs in few batches. A row's moments and its number of steps are its own: they stand still
while the rule is away, and its first step is corrected for bias as the first step of any parameter.
There is no weight decay.

Shapes: K rows, U rows of a step, d embedding size.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from umim_core.errors import ArtifactError
from umim_core.merging.forms.rule_rows import RuleRows

_EPSILON: Final = 1e-8


def row_table(objective: nn.Module) -> tuple[str, nn.Parameter] | None:
    """Return name and table of the rule rows that an objective trains; None without any."""
    for name, module in objective.named_modules():
        if isinstance(module, RuleRows) and module.table.requires_grad:
            return f"{name}.table", module.table
    return None


def row_tensors(objective: nn.Module) -> list[str]:
    """Return the names of the table and of the index of the rule rows that an objective trains."""
    if (table := row_table(objective)) is None:
        return []
    own = table[0].removesuffix("table")
    held = (*objective.named_parameters(), *objective.named_buffers())
    return [name for name, _ in held if name.startswith(own)]


class RowAdamW:
    """AdamW by rows, without weight decay.

    Args:
        table: The rows [K, d]; its gradients are sparse.
        betas: Decay of the moments.

    Source: AdamW; torch's SparseAdam, which counts steps for all rows together.
    """

    def __init__(self, table: nn.Parameter, betas: tuple[float, float]) -> None:
        self._table, self._betas = table, betas
        self._state = {
            "exp_avg": torch.zeros_like(table, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(table, requires_grad=False),
            "steps": torch.zeros(len(table), dtype=torch.int64, device=table.device),
        }

    def take_gradient(self) -> tuple[Tensor, Tensor]:
        """Return the rows [U] (int64, ascending) with a gradient and it [U, d]; it is cleared.

        Rows whose gradient is zero are none of them: lookups of spans without a row give such.
        """
        gradient, self._table.grad = self._table.grad, None
        if gradient is None:
            nothing = self._table.new_zeros(0, self._table.shape[1])
            return torch.zeros(0, dtype=torch.int64, device=nothing.device), nothing
        summed = gradient.coalesce()
        rows, values = summed.indices()[0], summed.values()
        moved = (values != 0).any(dim=1)
        return rows[moved], values[moved]

    def mark(self, rows: Tensor) -> Tensor:
        """Return for every row of the table [K] (int32) 1 if it is among some rows [U], else 0."""
        marks = torch.zeros(len(self._table), dtype=torch.int32, device=rows.device)
        marks[rows] = 1
        return marks

    @torch.no_grad()
    def step(self, rows: Tensor, gradient: Tensor, learning_rate: float) -> None:
        """Move some rows.

        Args:
            rows: Which [U] (int64), different ones.
            gradient: Theirs [U, d].
            learning_rate: Of this step.
        """
        first, second = self._betas
        means, squares, counts = self._state.values()
        mean = means[rows].lerp_(gradient, 1.0 - first)
        square = squares[rows].lerp_(gradient * gradient, 1.0 - second)
        steps = counts[rows] + 1
        means[rows], squares[rows], counts[rows] = mean, square, steps
        taken = steps[:, None].to(torch.float64)
        mean = mean / (1.0 - first**taken).to(mean.dtype)
        scale = (square / (1.0 - second**taken).to(square.dtype)).sqrt_().add_(_EPSILON)
        self._table[rows] -= learning_rate * (mean / scale)

    def tensors(self) -> dict[str, Tensor]:
        """Return moments and steps under the names of a resume state."""
        return {f"optimizer.rows.{name}": value for name, value in self._state.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore what :meth:`tensors` returned.

        Raises:
            ArtifactError: If it is of other rows.
        """
        for name, value in self._state.items():
            tensor = tensors.get(f"optimizer.rows.{name}")
            if tensor is None or tensor.shape != value.shape:
                raise ArtifactError(
                    "a resume state must fit its rule rows",
                    f"{name}: {None if tensor is None else tuple(tensor.shape)}",
                    "Remove the partial directory to start this stage afresh.",
                )
            value.copy_(tensor)
