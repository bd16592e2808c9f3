"""Ranks against one process with the joint batch, over a whole curve, and what breaks it.

In double precision two sums in another order differ by 1e-16, which AdamW enlarges: 1e-9 of a
value is what DDP may differ by. ZeRO-2 keeps its master weights in single precision whatever the
module: 5e-6 of a loss or a term is what it may differ by.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.tiny_training import CONFIG, ROWS, SEED, Kill, Run, train_here, train_rank
from support.training_processes import exit_codes, run_ranks, start_ranks
from umim_core.distill.train_loop import batch_indices

STEPS = CONFIG.max_steps
EVERY = CONFIG.model_copy(update={"checkpoint_every": 1})
# The second rank of two gets every second place of a batch: none of these merges in step 2.
UNMERGED = set(batch_indices(SEED, 1, CONFIG.batch_size, ROWS)[1::2])
ONE_SIDED = tuple(index not in UNMERGED for index in range(ROWS))
LOSSES = (*("train_loss", "train_kl", "valid_cross_entropy", "valid_kl", "grad_norm"),)
WORLDS = {"ddp": torch.float64, "deepspeed": torch.float32}
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def joint(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Run]:
    """One process over whole batches, in either precision."""
    found = {}
    for dtype in (torch.float32, torch.float64):
        folder = tmp_path_factory.mktemp("joint")
        found[dtype] = Run(folder / "state", config=EVERY, dtype=dtype, merges=ONE_SIDED)
        train_here(found[dtype])
    return found


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Two ranks with each strategy, and with none."""
    found = {}
    for name, dtype in {**WORLDS, "none": torch.float64}.items():
        folder = tmp_path_factory.mktemp(name)
        found[name] = replace(
            Run(folder / "state", config=EVERY, dtype=dtype, merges=ONE_SIDED),
            strategy=name,
        )
        run_ranks(folder, 2, train_rank, found[name])
    return found


def worst(run: Run, other: Run) -> float:
    """Largest relative difference of a loss or gradient norm on the curve."""
    ours, theirs = run.curve(), other.curve()
    assert [sorted(row) for row in ours] == [sorted(row) for row in theirs]
    assert len([row for row in ours if "train_loss" in row]) == STEPS
    return max(
        abs(row[name] / second[name] - 1.0)
        for row, second in zip(ours, theirs, strict=True)
        for name in LOSSES
        if name in row
    )


@pytest.mark.parametrize(("strategy", "bound"), [("ddp", 1e-9), ("deepspeed", 5e-6)])
def test_the_whole_curve_of_two_ranks_is_that_of_the_joint_batch(
    joint: dict[torch.dtype, Run], pairs: dict[str, Run], strategy: str, bound: float
) -> None:
    assert worst(pairs[strategy], joint[WORLDS[strategy]]) <= bound


@pytest.mark.parametrize("strategy", WORLDS)
def test_both_ranks_end_with_the_same_weights(pairs: dict[str, Run], strategy: str) -> None:
    first, second = (pairs[strategy].weights(STEPS, rank) for rank in (0, 1))
    assert torch.equal(first, second)


@pytest.mark.parametrize("strategy", WORLDS)
def test_a_gradient_that_is_nan_on_one_rank_is_skipped_on_both(
    tmp_path: Path, strategy: str
) -> None:
    run = Run(tmp_path / "state", strategy=strategy, config=EVERY, bad_gradients=(2, 3))
    run = replace(run, config=EVERY.model_copy(update={"max_steps": 4}))
    run_ranks(tmp_path, 2, train_rank, run)
    skipped = [row["step"] for row in run.curve() if "skipped" in row]
    assert skipped == [2, 3]
    for rank in (0, 1):
        assert torch.equal(run.weights(3, rank), run.weights(3))
        assert bool(torch.isfinite(run.weights(4, rank)).all())
        assert not torch.equal(run.weights(4, rank), run.weights(3, rank))
        for name, value in run.state(4, rank).items():
            assert bool(torch.isfinite(value.double()).all()), name


@pytest.mark.parametrize("strategy", WORLDS)
def test_three_killed_ranks_resume_bit_for_bit(tmp_path: Path, strategy: str) -> None:
    """Sums of three depend on their order, so the exchange must have the same order on resume."""
    undisturbed = Run(tmp_path / "whole" / "state", strategy=strategy)
    run_ranks(tmp_path / "whole", 3, train_rank, undisturbed)
    run = replace(undisturbed, folder=tmp_path / "killed" / "state")
    kills = tuple(Kill(rank, 8) for rank in range(3))
    codes = exit_codes(start_ranks(tmp_path / "killed", 3, train_rank, replace(run, kills=kills)))
    assert -9 in codes and 0 not in codes
    run_ranks(tmp_path / "killed", 3, train_rank, run)
    log = (tmp_path / "killed" / "rank-0.log").read_text("utf-8")
    assert "resuming at step 6" in log
    assert run.final() == undisturbed.final()
