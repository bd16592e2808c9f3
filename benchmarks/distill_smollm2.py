"""The distillation step on SmolLM2-135M, 4 rows of 512 tokens: a table, then one JSON line.

    python -m benchmarks.distill_smollm2 --out docs/results/distill-smollm2.json

Sides: bfloat16 products, the same with weights cast for every product as autocast does by itself
(equal bits are required), and float32. Text and rules are those of ``engine_smollm2``; the module
is fresh. Each instruction set of ``--isa`` is measured in a process of its own: what oneDNN would
take on such a processor, emulated by leaving newer instructions out. Bound: the step's products
(teacher, student and its backward pass to the inputs, three with the head) at the best rate of the
machine's own products of that data type. Gate (P8): at most 6 s a step with the machine's own
instruction set, on the faster of both data types.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch
from torch import Tensor

from benchmarks.common import Benchmark, Gate, Report, at_most, fresh, save
from benchmarks.distill_sides import LENGTH, Batch, step_flops
from benchmarks.engine_smollm2 import CHECKPOINT, general_text
from benchmarks.timing import alternate, ratio, spread
from umim_core.backbone.shape import BackboneShape
from umim_core.benchmarking.roofline import measure_peak
from umim_core.checkpoint.checkpoint_files import resolve_checkpoint
from umim_core.distill.packed_trunk import PackedTrunk
from umim_core.distill.step import DistillModel
from umim_core.errors import ConfigError, UmimError
from umim_core.merging.compressed import Compressed
from umim_core.merging.module import MergeModule
from umim_core.model.umim import UMIM

STEP_SECONDS: Final = 6.0
OWN: Final = "DEFAULT"  # oneDNN's word for all that the processor has
ISAS: Final = (OWN, "AVX512_CORE_BF16", "AVX512_CORE")
_VARIABLE: Final = "ONEDNN_MAX_CPU_ISA"
OURS, CASTS, SINGLE = "bfloat16", "bfloat16, weights cast for every product", "float32"
Found = tuple[float, Tensor]  # mean loss, gradient


class CastingModel(DistillModel):
    """The step as autocast alone makes it: weights are cast for every product."""

    def __init__(self, compressed: Compressed) -> None:
        super().__init__(compressed, autocast=True)
        with self._precision():
            self._trunk = PackedTrunk(compressed.backbone)


def batch_of(umim: UMIM, rows: int) -> Batch:
    """Return rows of held-out text under a checkpoint's rules, and a fresh module."""
    module = MergeModule(umim.backbone.hidden_size)
    module.initialise(umim.backbone.embedding_std, torch.Generator().manual_seed(0))
    _, ids = general_text(umim, rows * LENGTH)
    segments = list(ids[: rows * LENGTH].reshape(rows, LENGTH))
    return Batch(umim.backbone, module, segments, [umim.matcher.segment(row) for row in segments])


def step(batch: Batch, model: DistillModel) -> Found:
    """Return the mean cross-entropy of a step and the gradient of the module's weights."""
    loss = model(batch.rows, batch.cuts)
    mean = loss.total / loss.rows
    gradients = torch.autograd.grad(mean, list(batch.module.parameters()))
    return float(mean.detach()), torch.cat([part.reshape(-1) for part in gradients])


def measure(batch: Batch, options: argparse.Namespace) -> Report:
    """Time every side in turn, against the bound of the products at the machine's best rate."""
    compressed = Compressed(batch.backbone, batch.module, None, "compact")
    models = {
        OURS: DistillModel(compressed, autocast=True),
        CASTS: CastingModel(compressed),
        SINGLE: DistillModel(compressed),
    }
    sides = {name: partial(step, batch, model) for name, model in models.items()}
    results: dict[str, Found] = {}
    seconds = alternate(sides, options.rounds, warmed=results.__setitem__)
    units = sum(len(starts) for starts, _ in batch.cuts)
    shape = BackboneShape.of_config(batch.backbone.model.config)
    flops = step_flops(shape, len(batch.rows) * LENGTH, units)
    peaks = {
        name: measure_peak(torch.device("cpu"), dtype).peak_flops
        for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32))
    }
    bounds = {name: flops / peak for name, peak in peaks.items()}
    (loss, gradient), single = results[OURS], results[SINGLE][1]
    return {
        "rows": len(batch.rows),
        "tokens": len(batch.rows) * LENGTH,
        "units": units,
        "flops": flops,
        "peak_flops": peaks,
        "bound_seconds": bounds,
        "equal": loss == results[CASTS][0] and torch.equal(gradient, results[CASTS][1]),
        "sides": {
            name: {
                "seconds": spread(times),
                "over_bound": spread(times)["median"] / bounds[name.partition(",")[0]],
                "time_ratio": ratio(seconds, name, CASTS),
                "gradient_error": float((results[name][1] - single).norm() / single.norm()),
            }
            for name, times in seconds.items()
        },
    }


def run(options: argparse.Namespace, report: Report) -> None:
    """Measure every instruction set; without the checkpoint there is one line and no result."""
    try:
        resolve_checkpoint(options.checkpoint)
    except UmimError as error:
        raise SystemExit(f"skipped: {error}") from error
    report["sets"] = {}
    for name in options.isa:
        report["sets"][name] = measure_set(name, options)
        save(report, options.out)


def measure_set(name: str, options: argparse.Namespace) -> Report:
    """Measure one instruction set; oneDNN reads which when a process starts.

    Raises:
        ConfigError: If all that the processor has is asked for where the environment forbids it.
    """
    held = os.environ.get(_VARIABLE, OWN)
    if name == OWN != held:
        raise ConfigError(
            f"{_VARIABLE} must not be set where {OWN} is measured", held, "Unset it, or name --isa."
        )
    if name == held:
        return measure(
            batch_of(UMIM.from_pretrained(options.checkpoint, dtype="float32"), options.rows),
            options,
        )
    with held_to(name):
        given = {"checkpoint": options.checkpoint, "rows": options.rows, "rounds": options.rounds}
        found: Report = fresh("distill_smollm2", isa=name, **given)["sets"][name]
    return found


@contextmanager
def held_to(name: str) -> Iterator[None]:
    """Hold the processes that are started to an instruction set."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


def gates(report: Report) -> dict[str, Gate]:
    """Return value, limit and verdict of the gate."""
    sides = report["sets"][OWN]["sides"] if OWN in report["sets"] else None
    if sides is None:
        return {}
    seconds = min(sides[name]["seconds"]["median"] for name in (OURS, SINGLE))
    return {"seconds a step": at_most(seconds, STEP_SECONDS)}


def equal(report: Report) -> bool:
    """Return whether weights that are held give the bits of weights that are cast."""
    return all(found["equal"] for found in report["sets"].values())


main = Benchmark(
    name="distill_smollm2",
    doc=__doc__,
    options={"checkpoint": CHECKPOINT, "isa": ISAS, "rows": 4, "rounds": 10},
    measure=run,
    gates=gates,
    equal=equal,
).main


if __name__ == "__main__":
    sys.exit(main())
