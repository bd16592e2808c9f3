"""The distillation step against a plain one that holds all logits, and Liger.

    python -m benchmarks.distill_step --out docs/results/distill_step.json
    python -m benchmarks.distill_step --ids tokens.npy --shapes embedded --rounds 3

First the loss alone, on random states of three shapes; then whole steps of the embedded backbone on
text. All sides get the same input, and their losses and gradients are compared in the run.
Memory is the growth of the peak of a process that computes one side once. Gates (P3): loss within
1e-5 and gradient within 1e-4 of the plain step in float32, memory of the loss at most a fifth, time
at most 1.1 times the plain one. Liger takes part where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.runner import (
    Benchmark,
    Gate,
    Report,
    alternate,
    at_most,
    fresh,
    in_process,
    memory_of,
    no_error_gate_missed,
    ratio,
    spread,
)
from benchmarks.subjects import (
    CORPUS_OPTIONS,
    EMBEDDED,
    Ids,
    ids_file,
    open_ids,
    untrained_module,
)
from umim_core.backbone.backbone import Backbone
from umim_core.errors import CorpusError, require
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.merging.packing import Segmentation, pack_rows
from umim_core.model.umim import UMIM
from umim_core.training.loss import DEFAULT_CHUNK, aligned_rows, distill_loss
from umim_core.training.step import DistillModel

OURS, PLAIN, LIGER = "ours", "plain", "Liger"
LENGTH: Final = 512  # tokens of a segment
LOSS_ERROR, GRADIENT_ERROR = 1e-5, 1e-4
MEMORY_SHARE, TIME_RATIO = 0.2, 1.1
Result = tuple[float, Tensor]  # mean loss, gradient
Side = Callable[[], Result]


@dataclass(frozen=True)
class Shape:
    """Aligned rows R, hidden size d and vocabulary V of a loss."""

    rows: int
    hidden: int
    vocab: int


SHAPES: Final = {
    "embedded": Shape(2048, 256, 8_192),
    "GPT-2": Shape(1024, 768, 50_257),
    "Llama-3.2-1B": Shape(1024, 2048, 128_256),
}
_TINY: Final = Shape(64, 64, 512)


@dataclass(frozen=True)
class Head:
    """Head of a backbone, as the loss asks for it."""

    head_weight: Tensor
    head_bias: None = None


@dataclass(frozen=True)
class StepBatch:
    """Rows of text, their units, and what they are distilled with."""

    backbone: Backbone
    module: MergeModule
    rows: list[Ids]
    cuts: list[Segmentation]

    @classmethod
    def of(cls, umim: UMIM, ids: Ids) -> StepBatch:
        """Return ids in segments under a checkpoint's rules, and a fresh module."""
        rows = list(ids.reshape(-1, LENGTH))
        cuts = [umim.matcher.segment(row) for row in rows]
        return cls(umim.backbone, untrained_module(umim.backbone), rows, cuts)

    @property
    def merged_model(self) -> MergedModel:
        return MergedModel(self.backbone, self.module, None)

    def sizes(self) -> Report:
        units = sum(len(starts) for starts, _ in self.cuts)
        return {"rows": len(self.rows), "tokens": sum(map(len, self.rows)), "units": units}


def gradient_of(loss: Tensor, module: MergeModule) -> Tensor:
    """Return the gradient of a module's weights in one vector; that of rule rows is sparse."""
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    return torch.cat([part.to_dense().flatten() for part in gradients])


def embedded_batch(ids_file: Path, rows: int) -> StepBatch:
    """Return the first segments of a file of ids under the rules of the embedded checkpoint."""
    ids = np.asarray(open_ids(ids_file, rows * LENGTH), dtype=np.int64)
    rule = f"{ids_file.name} must hold {rows * LENGTH} ids"
    require(len(ids) == rows * LENGTH, CorpusError, rule, len(ids))
    batch = StepBatch.of(UMIM.from_pretrained(EMBEDDED, dtype="float32"), ids)
    merged = batch.sizes()["units"] < len(ids)
    require(merged, CorpusError, f"some rule of {EMBEDDED} must match in {ids_file.name}")
    return batch


def liger_version() -> str | None:
    """Return the version of Liger, None where it is not installed."""
    return version("liger-kernel") if importlib.util.find_spec("liger_kernel") else None


def full_logits_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the sum of KL(teacher || student) of logits [R, V], as one writes it first."""
    return F.kl_div(
        student.log_softmax(-1), teacher.log_softmax(-1), reduction="sum", log_target=True
    )


def loss_sides(shape: Shape) -> dict[str, Side]:
    """Return every side's mean KL(teacher || student) and its gradient by the student [R, d]."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    weight = normal(shape.vocab, shape.hidden) * (2.0 * shape.hidden**-0.5)
    teacher = normal(shape.rows, shape.hidden)
    student = teacher + 0.3 * normal(shape.rows, shape.hidden)

    def side(mean: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Side:
        """Return the loss to show, and the gradient of the loss to train by."""

        def run() -> Result:
            leaf = student.clone().requires_grad_()
            shown, loss = mean(leaf)
            (gradient,) = torch.autograd.grad(loss, leaf)
            return float(shown.detach()), gradient

        return run

    def ours(leaf: Tensor) -> tuple[Tensor, Tensor]:
        loss = distill_loss(leaf, teacher, Head(weight))
        return loss.kl / shape.rows, loss.total / shape.rows

    def plain(leaf: Tensor) -> tuple[Tensor, Tensor]:
        logits = (F.linear(states, weight) for states in (leaf, teacher))
        loss = full_logits_loss(*logits) / shape.rows
        return loss, loss

    def liger(leaf: Tensor) -> tuple[Tensor, Tensor]:
        from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDFunction

        labels = torch.zeros(shape.rows, dtype=torch.int64)
        head = (leaf, weight, teacher, weight, labels, None, None)
        options = (0.0, 1.0, 0.0, -100, 1.0, False, DEFAULT_CHUNK["cpu"])
        loss = LigerFusedLinearJSDFunction.apply(*head, *options)
        return loss, loss

    found = {OURS: side(ours), PLAIN: side(plain)}
    return found | ({LIGER: side(liger)} if liger_version() else {})


def step_sides(batch: StepBatch, *, autocast: bool) -> dict[str, Side]:
    """Return every side's mean KL of a whole step and the gradient of the module's weights."""
    model = DistillModel(batch.merged_model, autocast=autocast)

    def ours() -> Result:
        loss = model(batch.rows, batch.cuts)
        return float(loss.kl) / loss.weight, gradient_of(loss.total / loss.weight, batch.module)

    def plain() -> Result:
        packed = pack_rows(batch.rows, batch.cuts)
        aligned = aligned_rows(packed)
        head = batch.backbone.head_weight
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            with torch.no_grad():
                raw = batch.backbone.embed(torch.from_numpy(np.stack(batch.rows)))
                hidden = batch.backbone.hidden(raw)
            merged = batch.backbone.hidden(batch.merged_model.embed(packed))
        student, teacher = (F.linear(states.to(head.dtype), head) for states in (merged, hidden))
        loss = full_logits_loss(
            student[aligned.batch, aligned.student], teacher[aligned.batch, aligned.teacher]
        ) / len(aligned.batch)
        return float(loss.detach()), gradient_of(loss, batch.module)

    return {OURS: ours, PLAIN: plain}


def compare(sides: dict[str, Side], rounds: int, to: str = PLAIN) -> Report:
    """Time sides in turn, and compare what they return with the result of one of them."""
    results: dict[str, Result] = {}
    seconds = alternate(sides, rounds, warmed=results.__setitem__)
    loss, gradient = results[to][0], results[to][1].float()
    return {
        name: {
            "seconds": spread(seconds[name]),
            "time_ratio": ratio(seconds, name, to),
            "loss": other_loss,
            "loss_error": abs(other_loss - loss) / abs(loss),
            "gradient_error": float((other.float() - gradient).norm() / gradient.norm()),
        }
        for name, (other_loss, other) in results.items()
    }


def memory(
    side: str, shape: Sequence[int] | None = None, ids: str = "", rows: int = 0
) -> dict[str, float]:
    """Return by how much one side, of a loss or of a whole step, grows a process of its own."""
    loss_sides(_TINY)[side if shape else PLAIN]()  # loads what a first call loads
    sides = loss_sides(Shape(*shape)) if shape else {}
    sides = sides or step_sides(embedded_batch(Path(ids), rows), autocast=False)
    return {"bytes": memory_of(sides[side])[0]}


def measure_loss(shape: Shape, rounds: int) -> Report:
    sides = compare(loss_sides(shape), rounds)
    for name, figures in sides.items():
        figures |= fresh("distill_step", "memory", side=name, shape=astuple(shape))
    return {**vars(shape), "sides": sides}


def measure_step(ids: Path, rows: int, rounds: int) -> Report:
    """Measure whole steps, in float32 and with bfloat16 products."""
    batch = embedded_batch(ids, rows)
    precisions: Report = {}
    for name, autocast in (("float32", False), ("bfloat16", True)):
        precisions[name] = compare(step_sides(batch, autocast=autocast), rounds)
    for name in (OURS, PLAIN):
        grown = fresh("distill_step", "memory", side=name, ids=ids, rows=rows)
        precisions["float32"][name] |= grown
    return batch.sizes() | {"precisions": precisions}


def gates(report: Report) -> dict[str, Gate]:
    judged: dict[str, Gate] = {}
    precisions = report["step"]["precisions"]
    measured = {f"loss_{name}": loss["sides"] for name, loss in report["losses"].items()}
    for name, sides in (measured | {"step": precisions["float32"]}).items():
        ours = sides[OURS]
        judged[f"{name}_error"] = at_most(ours["loss_error"] / LOSS_ERROR, 1.0)
        judged[f"{name}_gradient_error"] = at_most(ours["gradient_error"] / GRADIENT_ERROR, 1.0)
        judged[f"{name}_time"] = at_most(ours["time_ratio"]["median"], TIME_RATIO)
        if name != "step":
            judged[f"{name}_memory"] = at_most(ours["bytes"] / sides[PLAIN]["bytes"], MEMORY_SHARE)
    return judged


def run(options: argparse.Namespace, report: Report) -> None:
    rounds = options.rounds
    report["liger"] = liger_version()
    report["losses"] = {name: measure_loss(SHAPES[name], rounds) for name in options.shapes}
    report["step"] = measure_step(ids_file(options), options.rows, rounds)


BENCHMARK: Final = Benchmark(
    name="distill_step",
    doc=__doc__,
    options=CORPUS_OPTIONS | {"shapes": tuple(SHAPES), "rows": 8, "rounds": 10},
    measure=run,
    gates=gates,
    equal=no_error_gate_missed,
)

if __name__ == "__main__":
    in_process({"memory": memory}, BENCHMARK.main)
