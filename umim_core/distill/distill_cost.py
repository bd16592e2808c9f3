"""Predicted cost of a distillation, for people, for JSON, and as a limit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Final

from umim_core.errors import ResourceLimitError

MFU: Final = 0.45  # share of the peak that a step is assumed to reach, its gate on a GPU
_GIB: Final = 2.0**30


@dataclass(frozen=True)
class DistillMemory:
    """Bytes on one GPU.

    Attributes:
        weights: The frozen backbone, one copy for teacher and student.
        module: The merge module's weights, their gradient and AdamW's state.
        spans: What the merge module keeps for its backward pass.
        teacher: Working set of the teacher's forward.
        student: What the student's forward keeps for its backward pass.
        backward: Working set of the student's backward.
        loss: Chunks of logits, aligned hidden states and their gradient.
        context: What the process takes before it trains.
    """

    weights: float
    module: float
    spans: float
    teacher: float
    student: float
    backward: float
    loss: float
    context: float

    @property
    def working(self) -> float:
        """The larger of teacher and student, which follow each other as loss and backward do."""
        return max(self.teacher, self.student + max(self.loss, self.backward))

    @property
    def total(self) -> float:
        """The peak."""
        return self.weights + self.module + self.spans + self.context + self.working


@dataclass(frozen=True)
class DistillFlops:
    """FLOPs of one step on one GPU; causal attention counts half of its square.

    Attributes:
        teacher: Forward of the blocks.
        student: Forward, and backward by the input.
        attention: Scores and weighted sums of both.
        loss: Products with the head.
        module: The merge module, forward and backward.
    """

    teacher: float
    student: float
    attention: float
    loss: float
    module: float

    @property
    def total(self) -> float:
        """The sum."""
        return self.teacher + self.student + self.attention + self.loss + self.module


@dataclass(frozen=True)
class DistillPrediction:
    """Predicted cost of a distillation.

    Attributes:
        hardware: Name of the GPU; gpus: how many; gpu_memory_gib: memory of one.
        token_reduction: As assumed.
        memory: On one GPU.
        flops: Of one step on one GPU.
        step_seconds: Of one optimiser step.
        exchange_seconds: Of it, for the all-reduce.
        steps: Optimiser steps at most.
    """

    hardware: str
    gpus: int
    gpu_memory_gib: float
    token_reduction: float
    memory: DistillMemory
    flops: DistillFlops
    step_seconds: float
    exchange_seconds: float
    steps: int

    @property
    def seconds(self) -> float:
        """Time of all steps, validation left out."""
        return self.steps * self.step_seconds

    @property
    def fits(self) -> bool:
        """Whether the memory is enough."""
        return self.memory.total <= self.gpu_memory_gib * _GIB

    def as_dict(self) -> dict[str, object]:
        """Return the numbers for JSON."""
        totals = {
            "memory_bytes": self.memory.total,
            "fits": self.fits,
            "step_flops": self.flops.total,
            "seconds": self.seconds,
            "assumed_mfu": MFU,
        }
        return asdict(self) | totals

    def lines(self) -> list[str]:
        """Return the numbers for people, one a line."""
        memory = self.memory
        verdict = "fits" if self.fits else "does not fit"
        parts = {
            "weights": memory.weights,
            "module and AdamW": memory.module + memory.spans,
            "activations, loss": memory.working,
            "process": memory.context,
        }
        rows = [
            ("GPUs", f"{self.gpus} x {self.hardware}"),
            ("memory of a GPU", f"{_gib(memory.total)} of {self.gpu_memory_gib:g}, {verdict}"),
            *((f"  {name}", _gib(size)) for name, size in parts.items()),
            ("steps at most", f"{self.steps:,}"),
            ("time of a step", f"{self.step_seconds:.3f} s"),
            ("time, all", f"{self.seconds / 3600:,.1f} h"),
            ("assumed", f"token reduction {self.token_reduction:.1%}, {MFU:.0%} of the peak"),
        ]
        return [f"  {name:20}{value}" for name, value in rows]

    def check(self, backbone: str) -> None:
        """Refuse a training that does not fit.

        Raises:
            ResourceLimitError: If it needs more memory than a GPU has.
        """
        if not self.fits:
            raise ResourceLimitError(
                f"distillation of {backbone} must fit {self.gpu_memory_gib:g} GiB per GPU",
                f"{_gib(self.memory.total)} predicted",
                "Lower distill.micro_batch or distill.batch_size, or use GPUs with more memory.",
            )


def check_fits(predictions: Iterable[tuple[str, DistillPrediction]]) -> None:
    """Refuse trainings that do not fit, by what is trained.

    Raises:
        ResourceLimitError: If there is one.
    """
    for name, prediction in predictions:
        prediction.check(name)


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f} GiB"
