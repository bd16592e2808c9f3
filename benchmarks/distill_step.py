"""The distillation step against a plain one that holds all logits, and against Liger.

    python benchmarks/distill_step.py --out docs/results/distill_step.json
    python benchmarks/distill_step.py --ids tokens.npy --shapes embedded --rounds 3

First the loss alone, on random states of three shapes; then whole steps of the embedded backbone on
text. All sides get the same input, and their losses and gradients are compared in the run. Memory
is the growth of the peak of a process that computes one side once. Gates (P3): loss
within 1e-5 and gradient within 1e-4 of the plain step in float32, memory of the loss at most a
fifth, time at most 1.1 times the plain one. Liger takes part where it is installed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.common import Benchmark, Gate, Report, at_most, fresh
from benchmarks.corpus import CORPUS_OPTIONS, ids_file
from benchmarks.distill_sides import (
    OURS,
    PLAIN,
    SHAPES,
    Shape,
    compare,
    embedded_batch,
    liger_version,
    loss_sides,
    step_sides,
)

LOSS_ERROR, GRADIENT_ERROR = 1e-5, 1e-4
MEMORY_SHARE, TIME_RATIO = 0.2, 1.1


def measure_loss(shape: Shape, rounds: int) -> Report:
    """Measure the loss alone on one shape."""
    sides = compare(loss_sides(shape), rounds)
    text = f"{shape.rows},{shape.hidden},{shape.vocab}"
    for name, found in sides.items():
        found |= fresh("distill_sides", side=name, shape=text)
    return {**vars(shape), "sides": sides}


def measure_step(ids: Path, rows: int, rounds: int) -> Report:
    """Measure whole steps, in float32 and with bfloat16 products."""
    batch = embedded_batch(ids, rows)
    found: Report = {}
    for name, autocast in (("float32", False), ("bfloat16", True)):
        found[name] = compare(step_sides(batch, autocast=autocast), rounds)
    for name in (OURS, PLAIN):
        found["float32"][name] |= fresh("distill_sides", side=name, ids=ids, rows=rows)
    units = sum(len(starts) for starts, _ in batch.cuts)
    return {"rows": rows, "tokens": rows * len(batch.rows[0]), "units": units, "precisions": found}


def gates(report: Report) -> dict[str, Gate]:
    """Return value, limit and verdict of every gate."""
    found: dict[str, Gate] = {}
    measured = {
        **{f"loss_{name}": loss["sides"] for name, loss in report["losses"].items()},
        "step": report["step"]["precisions"]["float32"],
    }
    for name, sides in measured.items():
        ours = sides[OURS]
        found[f"{name}_error"] = at_most(ours["loss_error"] / LOSS_ERROR, 1.0)
        found[f"{name}_gradient_error"] = at_most(ours["gradient_error"] / GRADIENT_ERROR, 1.0)
        found[f"{name}_time"] = at_most(ours["time_ratio"]["median"], TIME_RATIO)
        share = ours["bytes"] / sides[PLAIN]["bytes"]
        if name != "step":
            found[f"{name}_memory"] = at_most(share, MEMORY_SHARE)
    return found


def run(options: argparse.Namespace, report: Report) -> None:
    """Measure the loss of every shape, then whole steps."""
    report["liger"] = liger_version()
    report["losses"] = {name: measure_loss(SHAPES[name], options.rounds) for name in options.shapes}
    report["step"] = measure_step(ids_file(options), options.rows, options.rounds)


def equal(report: Report) -> bool:
    """Return whether losses and gradients are those of the plain side."""
    return all(gate[2] for name, gate in report["gates"].items() if name.endswith("error"))


main = Benchmark(
    name="distill_step",
    doc=__doc__,
    options=CORPUS_OPTIONS | {"shapes": tuple(SHAPES), "rows": 8, "rounds": 10},
    measure=run,
    gates=gates,
    equal=equal,
).main


if __name__ == "__main__":
    sys.exit(main())
