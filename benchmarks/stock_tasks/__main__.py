"""Stock tasks of lm-evaluation-harness on a real model: base against UMIM.

    python -m benchmarks.stock_tasks --hub ../shared/hub --out docs/results/stock_tasks.json
    python -m benchmarks.stock_tasks --hub ../shared/hub --limit 20 --tasks arc_easy copa
    python -m benchmarks.stock_tasks --hub ../shared/hub --checkpoints umim-smollm2-135m new=DIR
        --raw-tails 0 16 64 --sides "no rules"

Every task is scored without examples by sides that merge nothing (``--sides``: lm-eval's own ``hf``
model on the backbone's weights, ours with ``merge=none``, our scorer over an empty rule set) and by
settings: every checkpoint with every ``--merge``, contexts (``prompt``) with every raw tail. All
checkpoints have one backbone. Differences to the base are paired by question; the base is
``merge=none``, without it ``hf``, without both the empty rule set, which answers as they do.

A finished cell (one task, one side) is written under ``--cells``; every call that needs it finds it
again, so a run that was stopped goes on, and further settings cost only themselves. A cell is found
by checkpoint, way of merging, backbone, task data, data type, batch size, limit and versions, not
by our own source or the machine: empty the folder to measure a change of the code. ``--hub`` holds
local copies of the tasks' data and must stand for the hub: nothing is asked of a network.

Gates of quality, of each setting that merges contexts: at most 1.0 point of mean accuracy lost
where it removes 15 % of the contexts' tokens or more, else at most 0.5 where 8 % or more. A context
counts whole: tokens of a raw tail are tokens that stay.

Gates, in float32: log-likelihoods of ``merge=none`` equal those of ``hf`` to 1e-4 nats, those of
the empty rule set to 1e-3 (sums over answers, in forwards of other shapes; 9e-5 measured between
batches of 1 and 64 on 32 short answers); the empty rule set takes no more time than ``hf``, on
tasks that both were measured on in this call, since the machine and its load may have changed. In
bfloat16 the same answers differ by up to 0.8 nats from float32, so float32 is the default.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from typing import Final

from benchmarks.common import Benchmark, Gate, Report, at_most, named
from benchmarks.finished_cells import find_cell, keep_cell
from benchmarks.stock_tasks.paired import averages, check_same_questions, compare, summary
from benchmarks.stock_tasks.task_cells import rows_kept_in, score_cell
from benchmarks.stock_tasks.task_sides import (
    BASE,
    LIBRARIES,
    MERGES,
    NO_RULES,
    UNMERGED,
    Models,
    Side,
    base_of,
    settings,
)
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import ConfigError
from umim_core.store.artifacts import directory_digest

TASKS: Final = ("arc_easy", "arc_challenge", "piqa", "openbookqa", "hellaswag", "copa")
CELLS: Final = Path(".umim/benchmarks/stock_tasks")
TOLERANCES: Final = {BASE: 1e-4, NO_RULES: 1e-3}  # nats of a log-likelihood, float32
# Token reduction of contexts, at least -> accuracy that may be lost.
MOST_LOST: Final = {0.15: 0.010, 0.08: 0.005}


def score(
    models: Models, sides: Sequence[Side], options: argparse.Namespace, data: str
) -> dict[str, dict[str, Report]]:
    """Return the cells of every task by side; a missing one is measured and written at once.

    Each says in ``kept`` whether an earlier call measured it.
    """
    cells, limit = options.cells.resolve(), options.limit
    keys = {
        (side, task): models.key(task, side, data, limit)
        for side in sides
        for task in options.tasks
    }
    missing = [place for place, key in keys.items() if find_cell(cells, key) is None]
    if missing:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1"}
        from umim_core.evaluation.tasks.task_runs import load_tasks

        kept = rows_kept_in(cells / f"data-{data[:16]}")
        with kept, chdir(options.hub):  # copies are found by paths that equal the hub's names
            loaded = load_tasks(options.tasks)
            for side in sides:
                tasks = [task for task in options.tasks if (side, task) in missing]
                model = models.model(side) if tasks else None
                for task in tasks:
                    cell = score_cell(model, loaded[task], limit)
                    keep_cell(cells, keys[side, task], cell)
                    took = f"{cell['seconds']:.1f} s"
                    print(f"{task} {side.label}: {took}", file=sys.stderr, flush=True)
    found: dict[str, dict[str, Report]] = {task: {} for task in options.tasks}
    for (side, task), key in keys.items():
        cell = find_cell(cells, key)
        assert cell is not None
        found[task][side.label] = cell | {"kept": (side, task) not in missing}
    return found


def run(options: argparse.Namespace, report: Report) -> None:
    """Score every task by every side and compare the sides.

    Raises:
        ConfigError: If there are too few questions for a standard error, or a raw tail is negative.
        BackboneMismatchError: If a checkpoint belongs to another backbone.
    """
    if options.limit is not None and options.limit < 2:
        raise ConfigError(
            "--limit must be at least 2", options.limit, "One question has no standard error."
        )
    places = named(options.checkpoints)
    merged = list(settings(places, options.merge, options.raw_tails))
    checkpoints = {name: Checkpoint.load(where) for name, where in places.items()}
    backbone = options.backbone or next(iter(checkpoints.values())).config.backbone
    if Path(backbone).exists():
        backbone = str(Path(backbone).resolve())  # the folder changes below
    batch_size = options.batch_size if options.batch_size == "auto" else int(options.batch_size)
    models = Models(checkpoints, backbone, options.dtype, batch_size)
    for checkpoint in checkpoints.values():
        checkpoint.check_backbone(models.backbone)
    data = directory_digest(options.hub)
    base = base_of(options.sides)
    report |= {
        "backbone": Path(backbone).name,
        "backbone_fingerprint": models.backbone.fingerprint,
        "checkpoints": {name: facts_of(checkpoint) for name, checkpoint in checkpoints.items()},
        "dtype": options.dtype,
        "batch_size": batch_size,
        "limit": options.limit,
        "data_digest": data,
        "base": base,
        "settings": {
            side.label: {
                "checkpoint": side.checkpoint,
                "merge": side.way,
                "raw_tail": side.raw_tail,
            }
            for side in merged
        },
        "tasks": {},
    }
    sides = [*(Side(way) for way in dict.fromkeys(options.sides)), *merged]
    cells = score(models, sides, options, data)
    kept = [cell["kept"] for scored in cells.values() for cell in scored.values()]
    report["cells"] = {"measured": kept.count(False), "kept": kept.count(True)}
    for task, scored in cells.items():
        check_same_questions(task, scored)
        rows = {label: summary(cell, scored[base]) for label, cell in scored.items()}
        report["tasks"][task] = {"sides": rows, "against_hf": compare(scored)}
    report["mean"] = averages(report["tasks"], [base, *report["settings"]])


def facts_of(checkpoint: Checkpoint) -> Report:
    """Return what a checkpoint is."""
    return {
        "module_digest": checkpoint.module.digest(),
        "rules": len(checkpoint.rules),
        "rules_digest": checkpoint.rules.digest,
    }


def gates(report: Report) -> dict[str, Gate]:
    """Return value, limit and verdict of every gate that applies."""
    return {**gates_of_equality(report), **gates_of_quality(report)}


def gates_of_equality(report: Report) -> dict[str, Gate]:
    """Return the gates of the sides that merge nothing, in float32."""
    compared = [task["against_hf"] for task in report["tasks"].values()]
    found: dict[str, Gate] = {}
    for side in (BASE, NO_RULES):
        rows = [row[side] for row in compared if side in row]
        if rows and report["dtype"] == "float32":
            label = side.replace(" ", "_")
            difference = max(row["difference"] for row in rows)
            # In units of the tolerance: a gate's value is rounded to four places.
            found[f"{label}_difference_from_hf"] = at_most(difference / TOLERANCES[side], 1.0)
            timed = [row for row in rows if row["same_call"]]
            if side == NO_RULES and timed:
                seconds, theirs = (sum(row[x] for row in timed) for x in ("seconds", "hf_seconds"))
                found["no_rules_times_hf"] = at_most(seconds / theirs, 1.0)
    return found


def gates_of_quality(report: Report) -> dict[str, Gate]:
    """Return the points of mean accuracy that each setting loses which merges contexts enough."""
    found: dict[str, Gate] = {}
    for label, setting in report["settings"].items():
        if setting["merge"] == "prompt":
            mean = report["mean"][label]
            saved, lost = mean["context_token_reduction"], -mean["acc_difference"]["mean"]
            least = next((least for least in MOST_LOST if saved >= least), None)
            if least is not None:
                name = f"points lost at a TR of contexts of {least:.0%} or more: {label}"
                found[name] = at_most(100 * lost, 100 * MOST_LOST[least])
    return found


def equal(report: Report) -> bool:
    """Return whether ``merge=none`` made the choices of lm-eval's own model on all questions."""
    compared = [task["against_hf"].get(BASE) for task in report["tasks"].values()]
    return all(row is None or row["other_choices"] == 0 for row in compared)


main = Benchmark(
    name="stock_tasks",
    doc=__doc__,
    options={
        "checkpoints": {"nargs": "+", "default": ["umim-smollm2-135m"], "metavar": "[NAME=]PATH"},
        "merge": MERGES,
        "raw_tails": [0],
        "sides": UNMERGED,
        "backbone": str,
        "hub": {"type": Path, "required": True},
        "cells": CELLS,
        "tasks": TASKS,
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
