"""Training rows in which no rule matches: an epoch of them, and a run shorter than one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.tiny_training import CONFIG, ROWS, SEED, Run, train_here, train_rank, train_until
from support.training_processes import run_ranks
from tasks.training.strategies import DdpStrategy
from umim_core.errors import CorpusError
from umim_core.training.train_loop import batch_indices, train

BATCH, STEPS = CONFIG.batch_size, CONFIG.max_steps
EPOCH = -(-ROWS // BATCH)  # batches that hold every row


def refused(run: Run) -> tuple[str, int]:
    """Train; return the message of the error and the number of batches before it."""
    objective = run.objective()
    strategy = DdpStrategy(objective, run.config)
    with pytest.raises(CorpusError) as caught:
        train(objective, strategy, run.config, seed=SEED, state_dir=run.folder)
    return str(caught.value), objective.batches


def test_an_epoch_without_merges_is_refused(tmp_path: Path) -> None:
    message, batches = refused(Run(tmp_path, merges=(False,) * ROWS))
    assert message == (
        f"training needs rows with at least one merge; got none in {ROWS} rows. "
        "Lower tau, or use other rules."
    )
    assert batches == EPOCH


def test_a_resumed_run_counts_the_merges_before_it(tmp_path: Path) -> None:
    """All merges are in the first batch; a state is saved after the third."""
    count = 2 * BATCH * STEPS
    first = batch_indices(SEED, 0, BATCH, count)
    run = Run(tmp_path, merges=tuple(index in first for index in range(count)))
    train_until(run, CONFIG.checkpoint_every)
    result, objective = train_here(run)
    assert (objective.batches, result.progress.step) == (STEPS - CONFIG.checkpoint_every, STEPS)


def test_predictions_count_the_same_whichever_rank_has_them(tmp_path: Path) -> None:
    """The rows of a batch have 4 or 20 aligned predictions; their sum is what is divided by."""
    once = CONFIG.model_copy(update={"max_steps": 1})
    joint, pair = (Run(tmp_path / name, config=once, dtype=torch.float64) for name in "ab")
    train_here(joint)
    run_ranks(tmp_path, 2, train_rank, pair)
    (step,), (expected,) = (
        [row for row in run.curve() if "train_loss" in row] for run in (pair, joint)
    )
    assert step == pytest.approx(expected, rel=1e-9)


@pytest.mark.full
def test_a_rank_without_merges_goes_on_with_one_that_has_some(tmp_path: Path) -> None:
    theirs = {i for step in range(EPOCH) for i in batch_indices(SEED, step, BATCH, ROWS)[1::2]}
    short = CONFIG.model_copy(update={"max_steps": EPOCH})
    merges = tuple(index not in theirs for index in range(ROWS))
    run = Run(tmp_path / "state", config=short, merges=merges)
    run_ranks(tmp_path, 2, train_rank, run)
    assert [row["step"] for row in run.curve() if "train_loss" in row] == [1, 2, 3]
