"""Infinities that come in through the data or the weights, in real steps: none is ever learnt.

``test_train_loop.py`` has losses and gradients that are NaN on command, ``test_strategies.py``
those of one rank of two.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.tiny_training import CONFIG, SEED, Run, Watched
from tasks.training.strategies import DdpStrategy
from umim_core.errors import NumericalError
from umim_core.training.train_loop import TrainResult, train
from umim_core.training.train_state import Progress

STEPS, BATCH = 8, 3
EVERY = CONFIG.model_copy(
    update={
        "max_steps": STEPS,
        "batch_size": BATCH,
        "checkpoint_every": 4,
        "validate_every": 1,
        "max_skipped_steps": 2,
    }
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, config=EVERY)


def finite(values: dict[str, torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(value.double()).all()) for value in values.values())


def spoil(run: Run, at: int, value: float) -> tuple[Watched, TrainResult]:
    """Train; after step ``at`` one weight of the module becomes ``value``, as by a bad cell."""
    objective = run.objective()

    def on_step(progress: Progress, _: int) -> None:
        if progress.step == at:
            with torch.no_grad():
                objective.module.linear_kv.weight[0, 0] = value

    strategy, where = DdpStrategy(objective, run.config), {"seed": SEED, "state_dir": run.folder}
    return objective, train(objective, strategy, run.config, **where, on_step=on_step)


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38], ids=["nan", "inf", "overflow"])
def test_spoilt_weights_are_never_the_best_and_end_a_run_that_allows_fewer(
    run: Run, value: float
) -> None:
    with pytest.raises(NumericalError, match=r"at most 2 steps .*; got 3\."):
        spoil(run, 3, value)
    most = EVERY.model_copy(update={"max_skipped_steps": STEPS})
    run = replace(run, folder=run.folder / "more", config=most)
    objective, result = spoil(run, 3, value)
    assert result.progress.skipped == STEPS - 3
    assert result.progress.best_step <= 3
    assert finite(result.weights)
    kept = objective.module.linear_kv.weight[0, 0].detach()
    torch.testing.assert_close(kept, torch.tensor(value), rtol=0.0, atol=0.0, equal_nan=True)
    later = [row for row in result.progress.curve if row["step"] > 3 and "skipped" not in row]
    assert [sorted(row) for row in later] == [["step"]] * (STEPS - 3)  # no score was finite
    json.dumps(result.progress.curve, allow_nan=False)
