"""Stock tasks of lm-evaluation-harness on a real model: base against UMIM.

    python -m benchmarks.stock_tasks --hub ../shared/hub --out docs/results/stock_tasks.json
    python -m benchmarks.stock_tasks --hub ../shared/hub --limit 20 --tasks arc_easy copa

Every task is scored without examples by five sides: lm-eval's own ``hf`` model on the backbone's
weights, ours with ``merge=none``, our scorer over an empty rule set, ``merge=prompt`` and
``merge=all``. A finished cell (one task, one side) is written under ``--cells``; the same command
finds it again, so a run that was stopped goes on. A cell is found by checkpoint, backbone, task
data, data type, batch size, limit and versions, not by our own source: empty the folder to measure
a change of the code. ``--hub`` holds local copies of the tasks' data and must stand for the hub:
nothing is asked of a network.

Gates, in float32: log-likelihoods of ``merge=none`` equal those of ``hf`` to 1e-4 nats, those of
the empty rule set to 1e-3 (sums over answers, in forwards of other shapes; 9e-5 measured between
batches of 1 and 64 on 32 short answers); the empty rule set takes no more time than ``hf``. In
bfloat16 the same answers differ by up to 0.8 nats from float32, so float32 is the default.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import chdir
from pathlib import Path
from typing import Final

from benchmarks.common import Benchmark, Gate, Report, at_most
from benchmarks.stock_tasks.paired import averages, check_same_questions, compare, summary
from benchmarks.stock_tasks.task_cells import (
    BASE,
    HF,
    LIBRARIES,
    NO_RULES,
    SIDES,
    Subject,
    find_cell,
    keep_cell,
    rows_kept_in,
    score_cell,
)
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.default_checkpoint import DEFAULT_CHECKPOINT
from umim_core.errors import ConfigError
from umim_core.store.artifacts import directory_digest

TASKS: Final = ("arc_easy", "arc_challenge", "piqa", "openbookqa", "hellaswag", "copa")
CELLS: Final = Path(".umim/benchmarks/stock_tasks")
TOLERANCES: Final = {BASE: 1e-4, NO_RULES: 1e-3}  # nats of a log-likelihood, float32


def score(subject: Subject, options: argparse.Namespace, data: str) -> dict[str, dict[str, Report]]:
    """Return the cells of every task by side; a missing one is measured and written at once."""
    cells, limit = options.cells.resolve(), options.limit
    keys = {
        (side, task): subject.key(task, side, data, limit)
        for side in options.sides
        for task in options.tasks
    }
    missing = [place for place, key in keys.items() if find_cell(cells, key) is None]
    if missing:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1"}
        from umim_core.evaluation.tasks.task_runs import load_tasks

        kept = rows_kept_in(cells / f"data-{data[:16]}")
        with kept, chdir(options.hub):  # copies are found by paths that equal the hub's names
            loaded = load_tasks(options.tasks)
            for side in options.sides:
                tasks = [task for task in options.tasks if (side, task) in missing]
                model = subject.side(side) if tasks else None
                for task in tasks:
                    cell = score_cell(model, loaded[task], limit)
                    keep_cell(cells, keys[side, task], cell)
                    print(f"{task} {side}: {cell['seconds']:.1f} s", file=sys.stderr, flush=True)
    found: dict[str, dict[str, Report]] = {task: {} for task in options.tasks}
    for (side, task), key in keys.items():
        cell = find_cell(cells, key)
        assert cell is not None
        found[task][side] = cell
    return found


def run(options: argparse.Namespace, report: Report) -> None:
    """Score every task by every side and compare the sides.

    Raises:
        ConfigError: If there are too few questions for a standard error.
    """
    if options.limit is not None and options.limit < 2:
        raise ConfigError(
            "--limit must be at least 2", options.limit, "One question has no standard error."
        )
    checkpoint = Checkpoint.load(options.checkpoint)
    name = options.name or Path(options.checkpoint).name
    backbone = options.backbone or checkpoint.config.backbone
    if Path(backbone).exists():
        backbone = str(Path(backbone).resolve())  # the folder changes below
    batch_size = options.batch_size if options.batch_size == "auto" else int(options.batch_size)
    subject = Subject(checkpoint, name, backbone, options.dtype, batch_size)
    data = directory_digest(options.hub)
    report |= {
        "checkpoint": subject.name,
        "backbone": Path(backbone).name,
        "backbone_fingerprint": subject.backbone.fingerprint,
        "module_digest": checkpoint.module.digest(),
        "rules": len(checkpoint.rules),
        "rules_digest": checkpoint.rules.digest,
        "dtype": options.dtype,
        "batch_size": batch_size,
        "limit": options.limit,
        "data_digest": data,
        "tasks": {},
    }
    found = score(subject, options, data)
    for task, scored in found.items():
        check_same_questions(task, scored)
        base = scored.get(BASE) or scored.get(HF)
        rows = {side: summary(cell, base) for side, cell in scored.items()}
        report["tasks"][task] = {"sides": rows, "against_hf": compare(scored)}
    report["mean"] = averages(report["tasks"])


def gates(report: Report) -> dict[str, Gate]:
    """Return value, limit and verdict of every gate that applies."""
    compared = [task["against_hf"] for task in report["tasks"].values()]
    found: dict[str, Gate] = {}
    for side in (BASE, NO_RULES):
        rows = [row[side] for row in compared if side in row]
        if rows and report["dtype"] == "float32":
            label = side.replace(" ", "_")
            difference = max(row["difference"] for row in rows)
            # In units of the tolerance: a gate's value is rounded to four places.
            found[f"{label}_difference_from_hf"] = at_most(difference / TOLERANCES[side], 1.0)
            if side == NO_RULES:
                seconds, theirs = (sum(row[x] for row in rows) for x in ("seconds", "hf_seconds"))
                found["no_rules_times_hf"] = at_most(seconds / theirs, 1.0)
    return found


def equal(report: Report) -> bool:
    """Return whether ``merge=none`` made the choices of lm-eval's own model on all questions."""
    compared = [task["against_hf"].get(BASE) for task in report["tasks"].values()]
    return all(row is None or row["other_choices"] == 0 for row in compared)


main = Benchmark(
    name="stock_tasks",
    doc=__doc__,
    options={
        "checkpoint": DEFAULT_CHECKPOINT,
        "name": str,
        "backbone": str,
        "hub": {"type": Path, "required": True},
        "cells": CELLS,
        "tasks": TASKS,
        "sides": SIDES,
        "limit": int,
        "dtype": {"default": "float32", "choices": ("float32", "bfloat16")},
        "batch_size": "32",
    },
    measure=run,
    gates=gates,
    equal=equal,
    libraries=LIBRARIES,
).main


if __name__ == "__main__":
    sys.exit(main())
