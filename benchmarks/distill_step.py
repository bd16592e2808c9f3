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
from typing import Final

import torch

from benchmarks.common import (
    THREADS,
    Gate,
    Report,
    Spread,
    add_report_options,
    alternate,
    at_most,
    close,
    facts,
    fix_threads,
    fresh,
    ratio,
)
from benchmarks.corpus import add_corpus_options, ids_file
from benchmarks.distill_sides import (
    OURS,
    PLAIN,
    SHAPES,
    Result,
    Shape,
    Side,
    embedded_batch,
    liger_version,
    loss_sides,
    step_sides,
)

LIBRARIES: Final = ("numpy", "torch", "transformers")
LOSS_ERROR, GRADIENT_ERROR = 1e-5, 1e-4
MEMORY_SHARE, TIME_RATIO = 0.2, 1.1


def compare(sides: dict[str, Side], rounds: int) -> Report:
    """Time sides in turn, and compare what they return with the plain side's result."""
    results: dict[str, Result] = {}
    seconds = alternate(sides, rounds, warmed=results.__setitem__)
    loss, gradient = results[PLAIN]
    found: Report = {}
    for name, (other_loss, other) in results.items():
        found[name] = {
            "seconds": Spread.of(seconds[name]).as_dict(),
            "time_ratio": ratio(seconds, name, PLAIN).as_dict(),
            "loss": other_loss,
            "loss_error": abs(other_loss - loss) / abs(loss),
            "gradient_error": float((other - gradient).norm() / gradient.norm()),
        }
    return found


def measure_loss(shape: Shape, rounds: int) -> Report:
    """Measure the loss alone on one shape."""
    sides = compare(loss_sides(shape), rounds)
    text = f"{shape.rows},{shape.hidden},{shape.vocab}"
    for name, found in sides.items():
        found["bytes"] = fresh("distill_sides", side=name, shape=text)["bytes"]
    return {"rows": shape.rows, "hidden": shape.hidden, "vocab": shape.vocab, "sides": sides}


def measure_step(ids: Path, rows: int, rounds: int) -> Report:
    """Measure whole steps, in float32 and with bfloat16 products."""
    batch = embedded_batch(ids, rows)
    found: Report = {}
    for name, autocast in (("float32", False), ("bfloat16", True)):
        found[name] = compare(step_sides(batch, autocast=autocast), rounds)
    for name in (OURS, PLAIN):
        found["float32"][name]["bytes"] = fresh("distill_sides", side=name, ids=ids, rows=rows)[
            "bytes"
        ]
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


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a gate is missed or a result differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_corpus_options(parser)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", type=int, default=8, help="segments of a step")
    parser.add_argument("--rounds", type=int, default=10)
    add_report_options(parser)
    options = parser.parse_args(arguments)
    fix_threads()
    torch.set_num_threads(THREADS)
    report: Report = {
        "benchmark": "distill_step",
        "facts": facts(LIBRARIES, options.commit),
        "liger": liger_version(),
        "losses": {name: measure_loss(SHAPES[name], options.rounds) for name in options.shapes},
        "step": measure_step(ids_file(options), options.rows, options.rounds),
    }
    report["gates"] = gates(report)
    report["equal"] = all(
        passed for name, (_, _, passed) in report["gates"].items() if name.endswith("error")
    )
    return close(report, options.out)


if __name__ == "__main__":
    sys.exit(main())
