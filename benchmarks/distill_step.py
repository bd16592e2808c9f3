"""The distillation step against a plain one that holds all logits, Liger, and its bounds.

    python -m benchmarks.distill_step --out docs/results/distill_step.json
    python -m benchmarks.distill_step --ids tokens.npy --shapes embedded --rounds 3
    python -m benchmarks.distill_step --on smollm2

On the embedded backbone: first the loss alone, on random states of three shapes; then whole steps
on text. Liger takes part where it is installed. On SmolLM2-135M: steps in bfloat16, the same with
weights cast for every product as autocast does by itself (equal bits are required), and in float32.
Gates: P3 and P8 of docs/performance.md. ``benchmarks.gpu`` has both on a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.runner import (
    Benchmark,
    Gates,
    Report,
    alternate,
    fresh,
    memory_of,
    ratio,
    spread,
)
from benchmarks.subjects import (
    CHECKPOINT,
    EMBEDDED,
    Ids,
    general_text,
    ids_file,
    open_ids,
)
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.shape import BackboneShape
from umim_core.checkpoint.untrained import fresh_module
from umim_core.config.form import ModuleForm
from umim_core.errors import CorpusError, require
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.merging.packing import Segmentation, pack_rows
from umim_core.model.umim import UMIM
from umim_core.rules.matcher import Matcher
from umim_core.throughput.roofline import measure_peak
from umim_core.training.loss import DEFAULT_CHUNK, aligned_rows, distill_loss
from umim_core.training.packed_trunk import PackedTrunk
from umim_core.training.step import DistillModel

OURS, PLAIN, LIGER = "ours", "plain", "Liger"
CASTS, SINGLE = "ours, weights cast for every product", "ours, float32"
LENGTH: Final = 512  # tokens of a segment
LOSS_ERROR, GRADIENT_ERROR = 1e-5, 1e-4
MEMORY_SHARE, TIME_RATIO = 0.2, 1.1
STEP_SECONDS: Final = 6.0  # of SmolLM2
ROWS: Final = {"embedded": 8, "smollm2": 4}
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
_CPU: Final = torch.device("cpu")


@dataclass(frozen=True)
class StepBatch:
    merged_model: MergedModel
    rows: list[Ids]
    cuts: list[Segmentation]

    @classmethod
    def of(cls, backbone: Backbone, rows: Sequence[Ids], matcher: Matcher) -> StepBatch:
        """Return rows under rules, and a fresh module."""
        module = fresh_module(backbone, matcher.rules, ModuleForm(), seed=0)
        cuts = [matcher.segment(row) for row in rows]
        return cls(MergedModel(backbone, module, None), list(rows), cuts)

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
    umim = UMIM.from_pretrained(EMBEDDED, dtype="float32")
    batch = StepBatch.of(umim.backbone, ids.reshape(-1, LENGTH), umim.matcher)
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


def loss_sides(
    shape: Shape, device: torch.device = _CPU, dtype: torch.dtype = torch.float32
) -> dict[str, Side]:
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
        logits = (F.linear(states, weight).float() for states in (leaf, teacher))
        loss = full_logits_loss(*logits) / shape.rows
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
    return found | ({LIGER: side(liger)} if liger_version() else {})


class CastingModel(DistillModel):
    """The step as autocast alone makes it: weights are cast for every product."""

    def __init__(self, merged_model: MergedModel) -> None:
        super().__init__(merged_model, autocast=True)
        with self._precision():
            self._trunk = PackedTrunk(merged_model.backbone)


def step_of(batch: StepBatch, model: DistillModel) -> Result:
    """Return the mean KL of a step and the gradient of the module's weights."""
    loss = model(batch.rows, batch.cuts)
    module = batch.merged_model.require_module()
    return float(loss.kl) / loss.weight, gradient_of(loss.total / loss.weight, module)


def step_sides(batch: StepBatch, *, autocast: bool) -> dict[str, Side]:
    """Return every side's mean KL of a whole step and the gradient of the module's weights."""
    model, backbone = batch.merged_model, batch.merged_model.backbone

    def plain() -> Result:
        packed = pack_rows(batch.rows, batch.cuts)
        aligned, head = aligned_rows(packed), backbone.head_weight
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            with torch.no_grad():
                hidden = backbone.hidden(backbone.embed(torch.from_numpy(np.stack(batch.rows))))
            merged = backbone.hidden(model.embed(packed))
        student, teacher = (F.linear(states.to(head.dtype), head) for states in (merged, hidden))
        loss = full_logits_loss(
            student[aligned.batch, aligned.student], teacher[aligned.batch, aligned.teacher]
        ) / len(aligned.batch)
        return float(loss.detach()), gradient_of(loss, model.require_module())

    ours = partial(step_of, batch, DistillModel(model, autocast=autocast))
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


def loss_memory(side: str, shape: Shape) -> float:
    """Return by how many bytes one side of a loss grows a process of its own."""
    loss_sides(_TINY)[side]()  # loads what a first call loads
    return memory_of(loss_sides(shape)[side])[0]


def step_memory(side: str, ids: Path, rows: int) -> float:
    """The same of a whole step."""
    loss_sides(_TINY)[PLAIN]()
    return memory_of(step_sides(embedded_batch(ids, rows), autocast=False)[side])[0]


def measure_loss(shape: Shape, rounds: int) -> Report:
    sides = compare(loss_sides(shape), rounds)
    for name, figures in sides.items():
        figures["bytes"] = fresh(loss_memory, name, shape)
    return {**vars(shape), "sides": sides}


def measure_step(ids: Path, rows: int, rounds: int) -> Report:
    batch = embedded_batch(ids, rows)
    precisions: Report = {}
    for name, autocast in (("float32", False), ("bfloat16", True)):
        precisions[name] = compare(step_sides(batch, autocast=autocast), rounds)
    for name in (OURS, PLAIN):
        precisions["float32"][name]["bytes"] = fresh(step_memory, name, ids, rows)
    return batch.sizes() | {"precisions": precisions}


def step_flops(shape: BackboneShape, raw: int, units: int, length: int = LENGTH) -> float:
    """Return the work of a step's products, those of the merge module left out: they are few.

    A teacher forward, the student's and its gradient by the inputs, causal attention, and three
    products with the head.
    """
    per_unit = 2.0 * shape.layers * shape.query_width * length
    attention = per_unit * raw + 3.0 * per_unit * units**2 / raw  # the student's rows are shorter
    products = shape.block_weights * (2.0 * raw + 4.0 * units)
    return products + attention + 6.0 * units * shape.head_weights


def measure_precisions(batch: StepBatch, rounds: int) -> Report:
    """Time a step in every precision in turn, against the bound of its products."""
    models = {
        OURS: DistillModel(batch.merged_model, autocast=True),
        CASTS: CastingModel(batch.merged_model),
        SINGLE: DistillModel(batch.merged_model),
    }
    sides = {name: partial(step_of, batch, model) for name, model in models.items()}
    found, sizes = compare(sides, rounds, to=SINGLE), batch.sizes()
    shape = BackboneShape.of_model(batch.merged_model.backbone.model)
    flops = step_flops(shape, sizes["tokens"], sizes["units"])
    single, half = (flops / measure_peak(_CPU, d).peak for d in (torch.float32, torch.bfloat16))
    for name, figures in found.items():
        bound = single if name == SINGLE else half
        figures |= {"over_bound": figures["seconds"]["median"] / bound, "bound_seconds": bound}
    (loss, gradient), (cast_loss, cast_gradient) = sides[OURS](), sides[CASTS]()
    same = loss == cast_loss and torch.equal(gradient, cast_gradient)
    return sizes | {"precisions": {"bfloat16 and float32": found}, "equal": same}


def gates(report: Report) -> Gates:
    judged = Gates()
    precisions = report["step"]["precisions"]
    if report["on"] == "smollm2":
        (sides,) = precisions.values()
        seconds = min(sides[name]["seconds"]["median"] for name in (OURS, SINGLE))
        judged.at_most("seconds_a_step", seconds, STEP_SECONDS)
        judged.at_most("held_weights_error", not report["step"]["equal"], 0.0)
        return judged
    measured = {f"loss_{name}": loss["sides"] for name, loss in report["losses"].items()}
    for name, sides in (measured | {"step": precisions["float32"]}).items():
        ours = sides[OURS]
        judged.at_most(f"{name}_error", ours["loss_error"] / LOSS_ERROR, 1.0)
        judged.at_most(f"{name}_gradient_error", ours["gradient_error"] / GRADIENT_ERROR, 1.0)
        judged.at_most(f"{name}_time", ours["time_ratio"]["median"], TIME_RATIO)
        if name != "step":
            judged.at_most(f"{name}_memory", ours["bytes"] / sides[PLAIN]["bytes"], MEMORY_SHARE)
    return judged


def run(options: argparse.Namespace, report: Report) -> None:
    rounds, rows = options.rounds, options.rows or ROWS[options.on]
    report |= {"on": options.on, "liger": liger_version(), "losses": {}}
    if options.on == "embedded":
        report["losses"] = {name: measure_loss(SHAPES[name], rounds) for name in options.shapes}
        report["step"] = measure_step(ids_file(options), rows, rounds)
    else:
        umim, tokens = UMIM.from_pretrained(options.checkpoint, dtype="float32"), rows * LENGTH
        text = general_text(umim, tokens)[1][:tokens].reshape(-1, LENGTH)
        batch = StepBatch.of(umim.backbone, text, umim.matcher)
        report["step"] = measure_precisions(batch, rounds)


BENCHMARK: Final = Benchmark(
    options={
        "ids": Path,
        "on": {"choices": tuple(ROWS), "default": "embedded"},
        "shapes": tuple(SHAPES),
        "checkpoint": CHECKPOINT,
        "rows": int,
        "rounds": 10,
    },
    measure=run,
    gates=gates,
    equal=("error",),
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
