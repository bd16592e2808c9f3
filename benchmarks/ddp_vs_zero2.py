"""DDP against ZeRO-2 on the CPU, and both against one process: a table, then one JSON line.

    python -m benchmarks.ddp_vs_zero2 --out docs/results/ddp_vs_zero2.json

Every side trains the same merge module on the same global batches, launched as the product
launches it (Ray Train), one core per rank. Losses of the whole curve are compared with those of one
process over the joint batch, and the weights of the ranks; gradients are compared in the tests. Of
DDP's optimiser state ZeRO-2 holds half the moments, and a master copy as an extra.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.runner import Benchmark, Gates, Report, fresh, peak_bytes, ratio, spread
from benchmarks.subjects import CORPUS_OPTIONS, ids_file, mined_rules, open_ids
from tasks.cluster.lease import ClusterLease
from tasks.training.strategies import make_strategy
from tasks.training.train_worker import launch_worker
from umim_core.config.recipe import ClusterConfig, DistillConfig, TrainConfig
from umim_core.config.rule_options import RuleOptions
from umim_core.errors import ConfigError, CorpusError, require
from umim_core.store.arrays import save_array
from umim_core.store.artifacts import read_json, sha256_bytes, write_json
from umim_core.store.publication import STATE
from umim_core.text.token_ids import segment_borders
from umim_core.training.loss import BatchLoss
from umim_core.training.optimizer import Strategy
from umim_core.training.train_job import TrainJob, read_curve, run_job
from umim_core.training.train_ranks import rank_and_world
from umim_core.training.train_state import parameters_of

WARM_UP: Final = 2  # steps that are not counted
LOSSES: Final = ("train_loss", "train_kl", "valid_cross_entropy", "valid_kl")
LOSS_TOLERANCE: Final = 1e-4  # of the loss; float32 sums in another order, enlarged by AdamW
OPTIMIZER_SHARE: Final = 0.8
MOMENT: Final = "exp_avg"  # both moments begin so
JOINT, DDP, ZERO2 = "one process", "DDP, 2 workers", "ZeRO-2, 2 workers"
SIDES: Final = {  # strategy and workers
    JOINT: ("ddp", 0),
    "DDP, 1 worker": ("ddp", 1),
    "ZeRO-2, 1 worker": ("deepspeed", 1),
    DDP: ("ddp", 2),
    ZERO2: ("deepspeed", 2),
}


class Watch:
    """A rank's strategy, which notes the seconds of its steps and its weights after the last."""

    def __init__(self, inner: Strategy, objective: nn.Module) -> None:
        self._inner, self._objective, self._began = inner, objective, 0.0
        self.tensors, self.load = inner.tensors, inner.load
        self.seconds: list[float] = []
        self.weights = b""

    def loss(self, indices: Sequence[int]) -> BatchLoss:
        self._began = time.perf_counter()
        return self._inner.loss(indices)

    def update(self, scaled: Tensor, learning_rate: float) -> float:
        norm = self._inner.update(scaled, learning_rate)
        self.seconds.append(time.perf_counter() - self._began)
        weights = parameters_of(self._objective).values()
        self.weights = b"".join(value.numpy().tobytes() for value in weights)
        return norm


def train_measured(job: Report) -> None:
    """Train on this rank by a ``TrainJob`` as plain data, and write what was measured."""
    torch.set_num_threads(1)  # every rank has one core, one process too
    watched: list[Watch] = []

    def watch(objective: nn.Module, config: TrainConfig) -> Strategy:
        watched.append(Watch(make_strategy(job["strategy"], objective, config), objective))
        return watched[0]

    run_job(TrainJob(**job | {"config": DistillConfig.model_validate(job["config"])}), watch)
    (found,) = watched
    tensors = found.tensors()
    record = {
        "seconds": found.seconds,
        "moment_bytes": sum(value.nbytes for name, value in tensors.items() if MOMENT in name),
        "optimizer_bytes": sum(value.nbytes for value in tensors.values()),
        "peak_bytes": peak_bytes(),
        "weights": sha256_bytes(found.weights),
    }
    write_json(Path(job["out"]) / f"rank-{rank_and_world()[0]}.json", record)


def prepare(ids: NDArray[np.integer], folder: Path, options: argparse.Namespace) -> Report:
    """Write ``rules`` of all ids [T], and the first ids as ``train.npy`` and ``valid.npy``."""
    length, wanted = options.length, options.segments + options.valid_segments
    whole = len(ids) // length
    rule = f"the ids must hold {wanted} segments of {length} tokens"
    require(whole >= wanted, CorpusError, rule, f"{whole} segments")
    flat = np.array(ids[: whole * length], dtype=np.int32)
    borders = segment_borders(len(flat), length)
    rules = mined_rules(flat, borders, RuleOptions(tau=options.tau))
    rules.save(folder / "rules")
    train, valid, _ = np.split(flat, [options.segments * length, wanted * length])
    save_array(folder / "train.npy", train)
    save_array(folder / "valid.npy", valid)
    return {"tokens": whole * length, "segment_length": length, "rules": len(rules)}


def launch(strategy: str, workers: int, job: Report, lease: ClusterLease) -> None:
    from benchmarks.ddp_vs_zero2 import train_measured  # workers import it by this name

    out = Path(job["out"])
    out.mkdir(parents=True)
    if not workers:
        fresh(train_measured, job)
        return
    config = lease.config.model_copy(update={"workers": workers, "strategy": strategy})
    lease.ensure()
    with ClusterLease(config) as joined:  # the cluster that runs already
        launch_worker(partial(train_measured, job), out, joined)


def read(out: Path, steps: int) -> Report:
    state = out / STATE / f"step-{steps:08d}"
    return {
        "ranks": [read_json(path) for path in sorted(out.glob("rank-*.json"))],
        "curve": read_curve(out),
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


def largest(values: Iterable[float]) -> float:
    """Return the largest value, NaN if there is one: ``max`` might pass over it."""
    return float(np.max(list(values)))


def compare(runs: dict[str, list[Report]]) -> Report:
    """Summarise all rounds of all sides; differences are those of the first round."""
    joint = runs[JOINT][0]
    seconds = {
        name: [float(np.median(one["ranks"][0]["seconds"][WARM_UP:])) for one in runs[name]]
        for name in runs
    }
    sides = {}
    for name, rounds in runs.items():
        first = rounds[0]
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
            "ranks_equal": len({rank["weights"] for rank in first["ranks"]}) == 1,
        }
    return {"steps": len(joint["ranks"][0]["seconds"]), "sides": sides}


def gates(report: Report) -> Gates:
    sides: dict[str, Any] = report["sides"]
    share = sides[ZERO2]["optimizer_bytes"] / sides[DDP]["optimizer_bytes"]
    halves = sides[ZERO2]["moment_bytes"] / sides[DDP]["moment_bytes"]
    loss = largest(side["loss_difference"] for side in sides.values())
    gates = Gates()
    # In units of the tolerance, which four decimals would round away.
    gates.at_most("loss_difference_of_tolerance", loss / LOSS_TOLERANCE, 1.0)
    gates.at_least("ranks_equal", min(side["ranks_equal"] for side in sides.values()), 1.0)
    gates.at_most("zero2_moments_of_ddp", halves, 0.51)
    gates.at_most("zero2_optimizer_state_of_ddp", share, OPTIMIZER_SHARE)
    return gates


def run(options: argparse.Namespace, report: Report) -> None:
    rule = f"--steps must be above {WARM_UP} and --batch-size even"
    fits = options.steps > WARM_UP and options.batch_size % 2 == 0
    require(fits, ConfigError, rule, (options.steps, options.batch_size))
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
        tempfile.TemporaryDirectory(prefix="umim-training-benchmark-") as place,
        ClusterLease(ClusterConfig(cpus=2, workers=2, max_restarts=0)) as lease,
    ):
        folder = Path(place)
        report["corpus"] = prepare(open_ids(ids_file(options), options.tokens), folder, options)
        job = {"backbone": options.backbone, "max_tokens": options.length}
        job |= {name: str(folder / f"{name}.npy") for name in ("train", "valid")}
        job |= {"rules": str(folder / "rules"), "config": config.model_dump()}
        for number in range(options.rounds):
            for side in list(SIDES)[:: 1 if number % 2 == 0 else -1]:
                strategy, workers = SIDES[side]
                out = folder / f"{number}" / side.replace(" ", "-")
                launch(strategy, workers, {**job, "strategy": strategy, "out": str(out)}, lease)
                runs[side].append(read(out, options.steps))
    report |= {"backbone": options.backbone, "batch_size": options.batch_size, **compare(runs)}
    report["tolerances"] = {"loss": LOSS_TOLERANCE}


BENCHMARK: Final = Benchmark(
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
    equal=("loss_difference_of_tolerance", "ranks_equal"),
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
