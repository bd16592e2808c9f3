"""Training rows in which no rule matches: an epoch of them, and a run shorter than one."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.tiny_training import CONFIG, ROWS, SEED, Run, train_here, train_until
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
