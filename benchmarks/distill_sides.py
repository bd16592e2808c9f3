"""The sides of the distillation benchmark: ours, a plain one, and Liger; and what they read.

Run by itself, it computes one side once in a process of its own and prints, as JSON, by how much
the peak of its memory grew.
"""

from __future__ import annotations

import gc
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import Report, fix_threads, parse
from benchmarks.corpus import EMBEDDED, open_ids
from benchmarks.engine_sides import llama_config, random_backbone
from benchmarks.timing import alternate, forget_peak, peak_bytes, ratio, spread
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.shape import BackboneShape
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.merging.packing import Segmentation, pack_rows
from umim_core.model.umim import UMIM
from umim_core.training.loss import DEFAULT_CHUNK, aligned_rows, distill_loss
from umim_core.training.packed_trunk import PackedTrunk
from umim_core.training.step import DistillModel

OURS, PLAIN, LIGER = "ours", "plain", "Liger"
LENGTH: Final = 512  # tokens of a segment
Result = tuple[float, Tensor]  # mean loss, gradient
Side = Callable[[], Result]
Rows = list[NDArray[np.int64]]


@dataclass(frozen=True)
class Shape:
    """Aligned rows R, hidden size d and vocabulary V of a loss."""

    rows: int
    hidden: int
    vocab: int


@dataclass(frozen=True)
class Head:
    """Head of a backbone, as the loss asks for it."""

    head_weight: Tensor
    head_bias: None = None


SHAPES: Final = {
    "embedded": Shape(2048, 256, 8_192),
    "GPT-2": Shape(1024, 768, 50_257),
    "Llama-3.2-1B": Shape(1024, 2048, 128_256),
}


_TINY: Final = Shape(64, 64, 512)
_CPU: Final = torch.device("cpu")


def liger_version() -> str | None:
    """Return the version of Liger, None where it is not installed."""
    return version("liger-kernel") if importlib.util.find_spec("liger_kernel") else None


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

    def ours() -> Result:
        leaf, head = student.clone().requires_grad_(), Head(weight)
        loss = distill_loss(leaf, teacher, head)  # type: ignore[arg-type]  # no rest
        (gradient,) = torch.autograd.grad(loss.total / shape.rows, leaf)
        return float(loss.kl) / shape.rows, gradient

    def plain() -> Result:
        leaf = student.clone().requires_grad_()
        logits = (F.linear(states, weight).float() for states in (leaf, teacher))
        loss = full_logits_loss(*logits) / shape.rows
        (gradient,) = torch.autograd.grad(loss, leaf)
        return float(loss.detach()), gradient

    def liger() -> Result:
        from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDFunction

        leaf = student.clone().requires_grad_()
        labels = torch.zeros(shape.rows, dtype=torch.int64, device=device)
        head = (leaf, weight, teacher, weight, labels, None, None)
        on_gpu = device.type != "cpu"  # there it is compiled, as its authors mean it
        options = (0.0, 1.0, 0.0, -100, 1.0, on_gpu, DEFAULT_CHUNK["gpu" if on_gpu else "cpu"])
        loss = LigerFusedLinearJSDFunction.apply(*head, *options)
        (gradient,) = torch.autograd.grad(loss, leaf)
        return float(loss.detach()), gradient

    return {OURS: ours, PLAIN: plain} | ({LIGER: liger} if liger_version() else {})


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


def full_logits_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the sum of KL(teacher || student) of logits [R, V], as one writes it first."""
    return F.kl_div(
        student.log_softmax(-1), teacher.log_softmax(-1), reduction="sum", log_target=True
    )


@dataclass(frozen=True)
class Batch:
    """Rows of text, their units, and what they are distilled with."""

    backbone: Backbone
    module: MergeModule
    rows: Rows
    cuts: list[Segmentation]


def fresh_module(backbone: Backbone) -> MergeModule:
    """Return an untrained module of the default form."""
    module = MergeModule(backbone.hidden_size)
    module.initialise(backbone.embedding_std, torch.Generator().manual_seed(0))
    return module.to(backbone.device)


def embedded_batch(ids_file: Path, rows: int) -> Batch:
    """Return the first segments of a file of ids under the rules of the embedded checkpoint."""
    umim = UMIM.from_pretrained(EMBEDDED, dtype="float32")
    ids = np.asarray(open_ids(ids_file, rows * LENGTH), dtype=np.int64)
    if len(ids) < rows * LENGTH:
        raise SystemExit(f"{ids_file.name} must hold {rows * LENGTH} ids, not {len(ids)}")
    batch = batch_of(umim, ids)
    if all(len(starts) == LENGTH for starts, _ in batch.cuts):
        raise SystemExit(f"some rule of {EMBEDDED} must match in {ids_file.name}")
    return batch


def batch_of(umim: UMIM, ids: NDArray[np.int64]) -> Batch:
    """Return ids in segments under a checkpoint's rules, and a fresh module."""
    rows = list(ids.reshape(-1, LENGTH))
    cuts = [umim.matcher.segment(row) for row in rows]
    return Batch(umim.backbone, fresh_module(umim.backbone), rows, cuts)


def random_batch(shape: BackboneShape, device: torch.device, rows: int, length: int) -> Batch:
    """Return random ids and merges for a bfloat16 backbone of random weights."""
    config = llama_config(shape, length)
    backbone = random_backbone(config, dtype="bfloat16", device=str(device))
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, shape.vocab_size, length) for _ in range(rows)]
    return Batch(backbone, fresh_module(backbone), ids, random_cuts(rows, length, 0.4))


def random_cuts(rows: int, length: int, reduction: float) -> list[Segmentation]:
    """Return units of 1 to 3 tokens that remove about ``reduction`` of every row's tokens."""
    rng = np.random.default_rng(0)
    share = reduction / (2.0 - 2.0 * reduction)  # of units that are spans of three
    cuts = []
    for _ in range(rows):
        lengths = np.where(rng.random(length) < share, 3, 1).astype(np.int64)
        lengths = lengths[: int(np.searchsorted(lengths.cumsum(), length)) + 1]
        lengths[-1] -= lengths.sum() - length
        cuts.append((lengths.cumsum() - lengths, lengths))
    return cuts


class CastingModel(DistillModel):
    """The step as autocast alone makes it: weights are cast for every product."""

    def __init__(self, merged_model: MergedModel) -> None:
        super().__init__(merged_model, autocast=True)
        with self._precision():
            self._trunk = PackedTrunk(merged_model.backbone)


def step_of(batch: Batch, model: DistillModel) -> Result:
    """Return the mean loss of a step and the gradient of the module's weights."""
    loss = model(batch.rows, batch.cuts)
    mean = loss.total / loss.weight
    return float(mean.detach()), _gradient(mean, batch)


def _gradient(loss: Tensor, batch: Batch) -> Tensor:
    gradients = torch.autograd.grad(loss, list(batch.module.parameters()))
    return torch.cat([part.reshape(-1) for part in gradients])


def step_sides(batch: Batch, *, autocast: bool) -> dict[str, Side]:
    """Return every side's mean KL of a whole step and the gradient of the module's weights."""
    model = DistillModel(
        MergedModel(batch.backbone, batch.module, None, "compact"), autocast=autocast
    )

    def ours() -> Result:
        loss = model(batch.rows, batch.cuts)
        return float(loss.kl) / loss.weight, _gradient(loss.total / loss.weight, batch)

    def plain() -> Result:
        packed = pack_rows(batch.rows, batch.cuts)
        aligned = aligned_rows(packed)
        head = batch.backbone.head_weight
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            with torch.no_grad():
                raw = batch.backbone.embed(torch.from_numpy(np.stack(batch.rows)))
                hidden = batch.backbone.hidden(raw)
            units = MergedModel(batch.backbone, batch.module, None, "compact").embed(packed)
            merged = batch.backbone.hidden(units)
        student, teacher = (F.linear(states.to(head.dtype), head) for states in (merged, hidden))
        loss = full_logits_loss(
            student[aligned.batch, aligned.student], teacher[aligned.batch, aligned.teacher]
        ) / len(aligned.batch)
        return float(loss.detach()), _gradient(loss, batch)

    return {OURS: ours, PLAIN: plain}


def step_flops(shape: BackboneShape, raw: int, units: int, length: int = LENGTH) -> float:
    """Return the work of a step's products, those of the merge module left out: they are few.

    A teacher forward, the student's and its gradient by the inputs, causal attention, and three
    products with the head.
    """
    per_unit = 2.0 * shape.layers * shape.query_width * length
    attention = per_unit * raw + 3.0 * per_unit * units**2 / raw  # the student's rows are shorter
    products = shape.block_weights * (2.0 * raw + 4.0 * units)
    return products + attention + 6.0 * units * shape.head_weights


def growth(side: Side) -> float:
    """Return by how many bytes the peak of this process grew in one run of a side."""
    gc.collect()
    forget_peak()
    before = peak_bytes()
    side()
    return peak_bytes() - before


def main() -> None:
    """Measure the memory of one side."""
    options = parse(__doc__, {"side": str, "shape": str, "ids": Path, "rows": 8})
    fix_threads()
    sides: dict[str, Any]
    if options.shape is not None:  # rows,hidden,vocab of a loss; without it, a whole step
        loss_sides(_TINY)[options.side]()  # loads what a first call loads
        sides = loss_sides(Shape(*map(int, options.shape.split(","))))
    else:
        loss_sides(_TINY)[PLAIN]()
        sides = step_sides(embedded_batch(options.ids, options.rows), autocast=False)
    print(json.dumps({"bytes": growth(sides[options.side])}))


if __name__ == "__main__":
    main()
