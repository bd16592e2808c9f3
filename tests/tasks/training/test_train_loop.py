"""The training loop in process: data order, limits, NaN policy, selection and patience."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.merged_models import fresh_model
from tasks.training.strategies import DdpStrategy
from umim_core.backbone.backbone import Backbone
from umim_core.config.recipe import DistillConfig, TrainConfig
from umim_core.errors import CorpusError, NumericalError
from umim_core.training.loss import BatchLoss
from umim_core.training.objectives import DistillObjective
from umim_core.training.token_rows import TokenRows
from umim_core.training.train_loop import TrainResult, batch_indices, planned_steps, train
from umim_core.training.train_state import Progress

SEED, STEPS, WIDTH = 7, 6, 12
CONFIG = TrainConfig(
    max_steps=STEPS,
    batch_size=2,
    learning_rate=1e-2,
    validate_every=1,
    checkpoint_every=1,
    patience=100,
    max_skipped_steps=2,
)


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 13))
def test_a_batch_depends_on_its_position_alone(step: int, batch: int, items: int) -> None:
    chain = [index for s in range(41) for index in batch_indices(3, s, batch, items)]
    assert batch_indices(3, step, batch, items) == chain[step * batch : (step + 1) * batch]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(batch_indices(seed, step, 20, 20)) for seed in (0, 1) for step in (0, 1)}
    assert len(orders) == 4


@pytest.mark.parametrize(
    ("max_steps", "max_epochs", "batch", "items", "expected"),
    [
        (100, 3, 4, 8, 6),
        (5, 3, 4, 8, 5),
        (100, 15, 8, 9, 16),  # 128 of 135 places: never more than 15 epochs
        (100, 1, 8, 3, 1),  # one batch, though it is longer than the epoch
    ],
)
def test_the_lesser_limit_ends_a_run(
    max_steps: int, max_epochs: int, batch: int, items: int, expected: int
) -> None:
    config = CONFIG.model_copy(
        update={"max_steps": max_steps, "max_epochs": max_epochs, "batch_size": batch}
    )
    assert planned_steps(config, items) == expected


def rows(count: int, *, merges: bool = True, seed: int = 0) -> TokenRows:
    """Random rows in which the rule (1, 2) matches once or twice, or never."""
    ids = np.random.default_rng(seed).integers(3, 30, (count, WIDTH))
    if merges:
        ids[:, 2:4] = (1, 2)
        ids[::2, 8:10] = (1, 2)
    return TokenRows.of_rows(ids.tolist(), [WIDTH] * count)


class Faulty(DistillObjective):
    """Distillation with faults on command; ``fired`` counts them.

    Attributes:
        bad_loss: Numbers of the training batches (from 0) whose loss is NaN.
        infinite: Numbers of the batches with a loss that is infinite.
        bad_gradient: Numbers of the batches with a finite loss and a gradient that is not.
        scores: Validation cross-entropies to report in turn, in place of the measured ones.
    """

    bad_loss: tuple[int, ...] = ()
    infinite: tuple[int, ...] = ()
    bad_gradient: tuple[int, ...] = ()
    scores: Sequence[float] = ()
    calls = validations = fired = 0

    def forward(self, indices: Sequence[int]) -> BatchLoss:
        loss = super().forward(indices)
        call, self.calls = self.calls, self.calls + 1
        if call in (*self.bad_loss, *self.infinite):
            self.fired += 1
            return loss._replace(total=loss.total * (math.nan if self.bad_loss else math.inf))
        if call in self.bad_gradient:
            self.fired += 1
            return loss._replace(total=loss.total + (self.module.query * 0.0).sqrt().sum())
        return loss

    def validation_sums(self, rank: int, world: int, limit: int) -> list[float]:
        if not self.scores:
            return super().validation_sums(rank, world, limit)
        self.validations += 1
        return [1.0, self.scores[self.validations - 1], 0.5]


Start = Callable[..., Faulty]


@pytest.fixture
def objective(tiny_llama: Backbone) -> Start:
    """Make an objective over given training and validation rows."""

    def make(train_rows: TokenRows | None = None, valid_rows: TokenRows | None = None) -> Faulty:
        return Faulty(
            fresh_model(tiny_llama, [(1, 2)], 0.2, SEED),
            rows(5) if train_rows is None else train_rows,
            rows(3, seed=1) if valid_rows is None else valid_rows,
            DistillConfig(max_steps=1),
            bf16=False,
            batch_size=2,
        )

    return make


def weights(objective: DistillObjective) -> Tensor:
    return torch.cat([p.detach().clone().flatten() for p in objective.module.parameters()])


def run(
    goal: Faulty, folder: Path, config: TrainConfig = CONFIG
) -> tuple[TrainResult, list[Tensor]]:
    """Train; return the result and the weights before the first and after every step."""
    seen = [weights(goal)]

    def on_step(progress: Progress, total: int) -> None:
        seen.append(weights(goal))

    strategy = DdpStrategy(goal, config)
    return train(goal, strategy, config, seed=SEED, state_dir=folder, on_step=on_step), seen


def best(result: TrainResult) -> Tensor:
    return torch.cat([value.flatten() for value in result.weights.values()])


@pytest.mark.parametrize("fault", ["bad_loss", "infinite", "bad_gradient"])
def test_a_step_that_is_not_finite_is_counted_and_changes_nothing(
    objective: Start, tmp_path: Path, fault: str
) -> None:
    goal = objective()
    setattr(goal, fault, (1, 3))
    result, seen = run(goal, tmp_path)
    assert goal.fired == 2
    assert (result.progress.step, result.progress.skipped) == (STEPS, 2)
    assert [row["step"] for row in result.progress.curve if "skipped" in row] == [2.0, 4.0]
    changed = [not torch.equal(a, b) for a, b in pairwise(seen)]
    assert changed == [True, False, True, False, True, True]
    assert bool(torch.isfinite(seen[-1]).all())


@pytest.mark.parametrize("fault", ["bad_loss", "infinite", "bad_gradient"])
def test_one_bad_step_too_many_ends_the_run(objective: Start, tmp_path: Path, fault: str) -> None:
    goal = objective()
    setattr(goal, fault, (0, 2, 3, 4))
    with pytest.raises(NumericalError, match=r"at most 2 steps may have a loss .*; got 3\."):
        run(goal, tmp_path)
    assert goal.fired == 3


def test_a_validation_that_is_nan_is_never_the_best(objective: Start, tmp_path: Path) -> None:
    goal = objective()
    goal.scores = (math.nan, 3.0, math.nan, 2.0, -math.inf, 2.5, math.nan)
    result, seen = run(goal, tmp_path)
    assert (result.progress.best_score, result.progress.best_step) == (2.0, 3)
    assert torch.equal(best(result), seen[3])
    json.dumps(result.progress.curve, allow_nan=False)


def test_a_weight_that_is_infinite_is_never_of_the_best(objective: Start, tmp_path: Path) -> None:
    """As by a bad memory cell: every later loss is not finite, and no score is there."""
    goal, config = objective(), CONFIG.model_copy(update={"max_skipped_steps": STEPS})

    def spoil(progress: Progress, _: int) -> None:
        if progress.step == 3:
            with torch.no_grad():
                goal.module.linear_kv.weight[0, 0] = math.inf

    result = train(
        goal, DdpStrategy(goal, config), config, seed=SEED, state_dir=tmp_path, on_step=spoil
    )
    assert (result.progress.skipped, result.progress.best_step <= 3) == (STEPS - 3, True)
    assert bool(torch.isfinite(best(result)).all())
    later = [row for row in result.progress.curve if row["step"] > 3 and "skipped" not in row]
    assert [sorted(row) for row in later] == [["step"]] * (STEPS - 3)


def test_patience_ends_the_run_and_the_best_weights_are_returned(
    objective: Start, tmp_path: Path
) -> None:
    goal = objective()
    goal.scores = (5.0, 4.0, 4.5, 3.0, 3.0, 3.5)  # an equal score is no improvement
    result, seen = run(goal, tmp_path, CONFIG.model_copy(update={"patience": 2}))
    assert result.progress.finished
    assert (result.progress.step, result.progress.best_step, result.progress.stale) == (5, 3, 2)
    assert torch.equal(best(result), seen[3])


def merging_in(places: Sequence[int], count: int) -> TokenRows:
    """Rows of which only these have a merge."""
    made = rows(count)
    open_until = [WIDTH if index in places else 0 for index in range(count)]
    return TokenRows.of_rows([made.row(i).tolist() for i in range(count)], open_until)


def test_a_batch_without_merges_changes_nothing(objective: Start, tmp_path: Path) -> None:
    count = CONFIG.batch_size * STEPS  # one epoch
    fourth = batch_indices(SEED, 3, CONFIG.batch_size, count)
    result, seen = run(objective(train_rows=merging_in(fourth, count)), tmp_path)
    changed = [not torch.equal(a, b) for a, b in pairwise(seen)]
    assert changed == [False, False, False, True, False, False]
    found = [row["aligned_rows"] > 0 for row in result.progress.curve if "aligned_rows" in row]
    assert found == changed
    assert result.progress.skipped == 0


def test_validation_without_merges_is_refused(objective: Start, tmp_path: Path) -> None:
    goal = objective(valid_rows=rows(3, merges=False))
    with pytest.raises(
        CorpusError, match="validation needs rows with at least one merge; got none"
    ):
        run(goal, tmp_path)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_the_ranks_share_the_validation_rows_between_them(objective: Start, world: int) -> None:
    goal = objective(valid_rows=rows(4, seed=1))
    shares = [goal.validation_sums(rank, world, 3) for rank in range(world)]
    whole = goal.validation_sums(0, 1, 3)
    assert np.sum(shares, axis=0) == pytest.approx(whole, rel=1e-5)
    assert whole[0] < goal.validation_sums(0, 1, 4)[0]
