"""DDP against ZeRO-2 on the CPU, and both against one process: a table, then one JSON line.

    python benchmarks/ddp_vs_zero2.py --out docs/results/ddp_vs_zero2.json

Every side trains the same merge module on the same global batches, launched as the product
launches it (Ray Train), one core per rank. Compared with one process over the joint batch: losses
of the whole curve, the first gradient, the weights of the ranks. Measured: seconds per step,
optimiser state and peak memory per rank, bytes of a resume state.
Gates: equal losses and gradient within the tolerances below; the optimiser state that ZeRO-2
holds per rank at two workers at most 0.8 of DDP's (moments are halved; with float32 weights its
master copy is an extra).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.common import Benchmark, Gate, Report, at_least, at_most, fresh
from benchmarks.corpus import CORPUS_OPTIONS, Ids, ids_file, open_ids
from benchmarks.processes.training_process import Job, train_measured
from benchmarks.timing import ratio, spread
from tasks.cluster.lease import ClusterLease
from tasks.training.train_worker import launch_worker
from umim_core.config.recipe import ClusterConfig, DistillConfig
from umim_core.config.rule_options import RuleOptions
from umim_core.mining.counting import count_ngrams
from umim_core.rules.origin import RuleOrigin
from umim_core.rules.ruleset import RuleSet
from umim_core.store.publication import STATE
from umim_core.text.token_ids import UniformOffsets
from umim_core.training.token_rows import TokenRows

WARM_UP: Final = 2  # steps that are not counted
LOSSES: Final = ("train_loss", "train_kl", "valid_cross_entropy", "valid_kl")
LOSS_TOLERANCE: Final = 1e-4  # of the loss; float32 sums in another order, enlarged by AdamW
GRADIENT_TOLERANCE: Final = 1e-5  # of the largest component
OPTIMIZER_SHARE: Final = 0.8
JOINT, DDP, ZERO2 = "one process", "DDP, 2 workers", "ZeRO-2, 2 workers"


@dataclass(frozen=True)
class Side:
    """One way to train."""

    strategy: Literal["ddp", "deepspeed"]
    workers: int


SIDES: Final = {
    JOINT: Side("ddp", 0),
    "DDP, 1 worker": Side("ddp", 1),
    "ZeRO-2, 1 worker": Side("deepspeed", 1),
    DDP: Side("ddp", 2),
    ZERO2: Side("deepspeed", 2),
}


def prepare(ids: Ids, folder: Path, options: argparse.Namespace) -> Report:
    """Write ``rules`` of all ids [T], and the rows ``train`` and ``valid`` of the first ones."""
    length, wanted = options.length, options.segments + options.valid_segments
    whole = len(ids) // length
    if whole < wanted:
        raise SystemExit(f"{wanted} segments of {length} tokens are needed; the ids hold {whole}")
    flat = np.array(ids[: whole * length], dtype=np.int32)
    counts = count_ngrams(flat, UniformOffsets(length, whole), options.tau)
    rules = RuleSet.from_counts(counts, RuleOrigin(options=RuleOptions(tau=options.tau)))
    rules.save(folder / "rules")
    rows = flat.reshape(-1, length)
    parts = {"train": rows[: options.segments], "valid": rows[options.segments : wanted]}
    for name, part in parts.items():
        TokenRows.of_rows(part.tolist(), [length] * len(part)).save(folder / name)
    return {"tokens": whole * length, "segment_length": length, "rules": len(rules)}


def launch(side: Side, job: Job, lease: ClusterLease) -> None:
    """Train once, on one core per rank."""
    out = Path(job.out)
    out.mkdir(parents=True)
    if side.workers == 0:
        file = out / "job.json"
        file.write_text(json.dumps(asdict(job)), encoding="utf-8")
        fresh("processes.training_process", job=file)
        return
    config = lease.config.model_copy(update={"workers": side.workers, "strategy": side.strategy})
    lease.ensure()
    with ClusterLease(config) as joined:  # the cluster that runs already
        launch_worker(train_measured, asdict(job), out, joined)


def read(out: Path, steps: int) -> Report:
    """Return what the ranks of one training left."""
    ranks = [json.loads(path.read_text("utf-8")) for path in sorted(out.glob("rank-*.json"))]
    firsts = [load_file(path) for path in sorted(out.glob("first-*.safetensors"))]
    state = out / STATE / f"step-{steps:08d}"
    return {
        "ranks": ranks,
        "curve": json.loads((out / "curve.json").read_text("utf-8")),
        "gradients": [torch.cat([part[k].flatten() for k in sorted(part)]) for part in firsts],
        "state_bytes": sum(file.stat().st_size for file in state.iterdir()),
    }


def worst_loss(training: Report, joint: Report) -> float:
    """Return the largest relative difference of a loss on the curve; infinite if a row lacks."""
    if [sorted(row) for row in training["curve"]] != [sorted(row) for row in joint["curve"]]:
        return float("inf")
    return largest(
        abs(row[name] / other[name] - 1.0)
        for row, other in zip(training["curve"], joint["curve"], strict=True)
        for name in LOSSES
        if name in row
    )


def worst_gradient(training: Report, joint: Report, *, sharded: bool) -> float:
    """Return the largest difference of the first gradient in units of its largest component.

    The shards of ZeRO-2 follow one another, with zeros at the end; the others hold it whole.
    """
    (expected,) = joint["gradients"]
    parts = training["gradients"]
    flats = [torch.cat(parts)[: len(expected)]] if sharded else parts
    return largest((flat - expected).abs().max() / expected.abs().max() for flat in flats)


def largest(values: Iterable[float | torch.Tensor]) -> float:
    """Return the largest value, NaN if there is one: ``max`` might pass over it."""
    return float(np.max([float(value) for value in values]))


def compare(runs: dict[str, list[Report]]) -> Report:
    """Summarise all rounds of all sides; differences are those of the first round."""
    joint = runs[JOINT][0]
    seconds = {name: [median_step(training) for training in runs[name]] for name in runs}
    sides = {}
    for name, rounds in runs.items():
        first, side = rounds[0], SIDES[name]
        steps = [s for run in rounds for s in run["ranks"][0]["seconds"][WARM_UP:]]
        sides[name] = {
            "ranks": len(first["ranks"]),
            "seconds_per_step": spread(steps),
            "times_one_process": ratio(seconds, name, JOINT),
            **{
                kind: max(rank[kind] for run in rounds for rank in run["ranks"])
                for kind in ("moment_bytes", "optimizer_bytes", "peak_bytes")
            },
            "state_bytes": first["state_bytes"],
            "loss_difference": worst_loss(first, joint),
            "gradient_difference": worst_gradient(
                first, joint, sharded=side.strategy == "deepspeed"
            ),
            "ranks_equal": len({rank["weights"] for rank in first["ranks"]}) == 1,
        }
    return {"steps": len(joint["ranks"][0]["seconds"]), "sides": sides}


def median_step(training: Report) -> float:
    """Return the median seconds of a step of one training."""
    return float(np.median(training["ranks"][0]["seconds"][WARM_UP:]))


def gates(report: Report) -> dict[str, Gate]:
    """Return value, limit and verdict of every gate."""
    sides: dict[str, Any] = report["sides"]
    share = sides[ZERO2]["optimizer_bytes"] / sides[DDP]["optimizer_bytes"]
    halves = sides[ZERO2]["moment_bytes"] / sides[DDP]["moment_bytes"]

    def worst(kind: str, tolerance: float) -> Gate:
        """In units of the tolerance, which four decimals would round away."""
        return at_most(largest(side[kind] for side in sides.values()) / tolerance, 1.0)

    return {
        "loss_difference_of_tolerance": worst("loss_difference", LOSS_TOLERANCE),
        "gradient_difference_of_tolerance": worst("gradient_difference", GRADIENT_TOLERANCE),
        "ranks_equal": at_least(float(all(side["ranks_equal"] for side in sides.values())), 1.0),
        "zero2_moments_of_ddp": at_most(halves, 0.51),
        "zero2_optimizer_state_of_ddp": at_most(share, OPTIMIZER_SHARE),
    }


def run(options: argparse.Namespace, report: Report) -> None:
    """Train with every side in turn, forwards and backwards."""
    if options.steps <= WARM_UP or options.batch_size % 2:
        raise SystemExit(f"--steps must be above {WARM_UP} and --batch-size even")
    config = DistillConfig(
        max_steps=options.steps,
        max_epochs=1000,
        batch_size=options.batch_size,
        validate_every=options.steps,
        validation_rows=options.valid_segments,
        checkpoint_every=options.steps,
        bf16=False,
    )
    runs: dict[str, list[Report]] = {name: [] for name in SIDES}
    with (
        tempfile.TemporaryDirectory(prefix="umim-training-benchmark-") as name,
        ClusterLease(ClusterConfig(cpus=2, workers=2, max_restarts=0)) as lease,
    ):
        folder = Path(name)
        report["corpus"] = prepare(open_ids(ids_file(options), options.tokens), folder, options)
        job = Job(options.backbone, str(folder), "ddp", config.model_dump(), 0, "")
        for number in range(options.rounds):
            for side_name in list(SIDES)[:: 1 if number % 2 == 0 else -1]:
                side, out = SIDES[side_name], folder / f"{number}" / side_name.replace(" ", "-")
                launch(side, replace(job, strategy=side.strategy, out=str(out)), lease)
                runs[side_name].append(read(out, options.steps))
    report |= {"backbone": options.backbone, "batch_size": options.batch_size, **compare(runs)}
    report["tolerances"] = {"loss": LOSS_TOLERANCE, "gradient": GRADIENT_TOLERANCE}


def equal(report: Report) -> bool:
    """Return whether all sides trained the same, within the tolerances."""
    names = ("loss_difference_of_tolerance", "gradient_difference_of_tolerance", "ranks_equal")
    return all(report["gates"][name][2] for name in names)


main = Benchmark(
    name="ddp_vs_zero2",
    doc=__doc__,
    libraries=("deepspeed", "ray", "torch", "transformers"),
    options=CORPUS_OPTIONS
    | {
        "backbone": "umim-docs-llama",
        "tau": 5,
        "length": 256,
        "segments": 64,
        "valid_segments": 4,
        "batch_size": 8,
        "steps": 12,
        "rounds": 3,
    },
    measure=run,
    gates=gates,
    equal=equal,
).main


if __name__ == "__main__":
    sys.exit(main())
