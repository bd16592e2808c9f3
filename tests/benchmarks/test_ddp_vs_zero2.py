from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.common import Report
from benchmarks.ddp_vs_zero2 import (
    DDP,
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    SIDES,
    WARM_UP,
    ZERO2,
    compare,
    gates,
)
from support.benchmark_runs import run_benchmark

GRADIENT = torch.tensor([4.0, -2.0, 1.0])


def found(ranks: int, *, loss: float = 2.0, bytes_per_rank: int = 100) -> Report:
    """What one training left; steps take 1, 2, ... seconds."""
    rank = {
        "seconds": [1.0 + step for step in range(WARM_UP + 3)],
        "moment_bytes": bytes_per_rank,
        "optimizer_bytes": bytes_per_rank,
        "peak_bytes": 2.0**30,
        "weights": "digest",
    }
    return {
        "ranks": [dict(rank) for _ in range(ranks)],
        "curve": [{"step": 1, "train_loss": loss, "train_kl": 1.0}, {"step": 1, "valid_kl": 0.5}],
        "gradients": [GRADIENT.clone() for _ in range(ranks)],
        "state_bytes": 1000,
    }


def all_runs() -> dict[str, list[Report]]:
    runs = {name: [found(max(1, side.workers))] for name, side in SIDES.items()}
    runs[ZERO2] = [found(2, bytes_per_rank=50)]
    for name, side in SIDES.items():
        if side.strategy == "deepspeed":
            flat = torch.cat([GRADIENT, torch.zeros(1)])
            runs[name][0]["gradients"] = list(flat.chunk(side.workers))
    return runs


def verdicts(runs: dict[str, list[Report]]) -> dict[str, bool]:
    return {name: gate[2] for name, gate in gates(compare(runs)).items()}


def test_equal_runs_pass_every_gate() -> None:
    assert all(verdicts(all_runs()).values())


def other_loss(runs: dict[str, list[Report]]) -> None:
    runs[DDP][0]["curve"][0]["train_loss"] *= 1.0 + 2.0 * LOSS_TOLERANCE


def other_gradient(runs: dict[str, list[Report]]) -> None:
    runs[DDP][0]["gradients"][1][0] += 8.0 * GRADIENT_TOLERANCE


def other_weights(runs: dict[str, list[Report]]) -> None:
    runs[ZERO2][0]["ranks"][1]["weights"] = "another"


def whole_moments(runs: dict[str, list[Report]]) -> None:
    for rank in runs[ZERO2][0]["ranks"]:
        rank["moment_bytes"] = 100


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        (other_loss, "loss_difference_of_tolerance"),
        (other_gradient, "gradient_difference_of_tolerance"),
        (other_weights, "ranks_equal"),
        (whole_moments, "zero2_moments_of_ddp"),
    ],
)
def test_a_gate_is_missed(change: object, missed: str) -> None:
    runs = all_runs()
    change(runs)  # type: ignore[operator]
    assert [name for name, passed in verdicts(runs).items() if not passed] == [missed]


@pytest.mark.full
def test_a_tiny_run_writes_results_and_page(rng: np.random.Generator, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", (rng.zipf(1.3, 200 * 32) % 1000).astype(np.int32))
    options = ["--length", 32, "--segments", 16, "--valid-segments", 2, "--batch-size", 4]
    run = run_benchmark("ddp_vs_zero2", tmp_path, *options, "--steps", 4, "--rounds", 1)
    assert run.status == 0
    assert run.report["sides"].keys() == SIDES.keys()
    assert "| ZeRO-2, 2 workers" in run.page
