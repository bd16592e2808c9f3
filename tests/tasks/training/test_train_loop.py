"""The training loop in process: data order, limits, NaN policy, selection, patience; resume states.

A run interrupted after any step, or with a torn state, ends the same bit for bit. States are
compared file by file, so weights, best weights, optimiser, random state and curve are all in the
comparison.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.tiny_training import CONFIG, ROWS, SEED, Run, Watched, train_here, train_until
from tasks.training.strategies import DdpStrategy, make_strategy
from umim_core.config.recipe import TrainConfig
from umim_core.errors import ArtifactError, CorpusError, NumericalError
from umim_core.training.train_loop import TrainResult, batch_indices, planned_steps, train
from umim_core.training.train_state import Progress, commit, newest_state, save

STEPS = 6
SHORT = CONFIG.model_copy(
    update={
        "max_steps": STEPS,
        "batch_size": 2,
        "validate_every": 1,
        "checkpoint_every": 1,
        "max_skipped_steps": 2,
    }
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
    limits = {"max_steps": max_steps, "max_epochs": max_epochs, "batch_size": batch}
    assert planned_steps(SHORT.model_copy(update=limits), items) == expected


def test_fewer_steps_than_were_asked_for_are_told(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    goal, config = run.objective(), SHORT.model_copy(update={"max_epochs": 1, "max_steps": 10**9})
    with caplog.at_level("INFO", "umim.progress"):
        result, _ = trained(goal, run.folder, config)
    told = f"1 epoch of {goal.num_items} rows: {result.progress.step} steps, fewer than the"
    assert any(line.startswith(told) for line in caplog.messages)
    one = trained(goal, run.folder / "one", config.model_copy(update={"batch_size": ROWS}))[0]
    assert one.progress.step == 1
    endless = config.model_copy(update={"batch_size": goal.num_items + 1})
    with pytest.raises(CorpusError, match=r"a batch must be at most .* 1 epoch of them; got"):
        trained(goal, run.folder / "endless", endless)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of six steps that validates after each."""
    return Run(tmp_path, config=SHORT)


def weights(objective: Watched) -> Tensor:
    return torch.cat([p.detach().clone().flatten() for p in objective.module.parameters()])


def trained(
    goal: Watched,
    folder: Path,
    config: TrainConfig = SHORT,
    on_step: Callable[[Progress], None] = lambda _: None,
) -> tuple[TrainResult, list[Tensor]]:
    """Train; return the result and the weights before the first and after every step."""
    seen = [weights(goal)]

    def note(progress: Progress, total: int) -> None:
        seen.append(weights(goal))
        on_step(progress)

    strategy = DdpStrategy(goal, config)
    return train(goal, strategy, config, seed=SEED, state_dir=folder, on_step=note), seen


def best(result: TrainResult) -> Tensor:
    return torch.cat([value.flatten() for value in result.weights.values()])


def reporting(goal: Watched, monkeypatch: pytest.MonkeyPatch, *scores: float) -> None:
    """Report validation cross-entropies in turn, in place of the measured ones."""
    reported = iter(scores)
    monkeypatch.setattr(goal, "validation_sums", lambda *_: [1.0, next(reported), 0.5])


@pytest.mark.parametrize("fault", ["nan", "inf", "gradient"])
def test_a_step_that_is_not_finite_is_counted_and_changes_nothing(run: Run, fault: str) -> None:
    goal = run.objective()
    goal.fault, goal.faulty = fault, (2, 4)
    result, seen = trained(goal, run.folder)
    assert (result.progress.step, result.progress.skipped) == (STEPS, 2)
    assert [row["step"] for row in result.progress.curve if "skipped" in row] == [2.0, 4.0]
    changed = [not torch.equal(a, b) for a, b in pairwise(seen)]
    assert changed == [True, False, True, False, True, True]
    assert bool(torch.isfinite(seen[-1]).all())


@pytest.mark.parametrize("fault", ["nan", "gradient"])
def test_one_bad_step_too_many_ends_the_run(run: Run, fault: str) -> None:
    goal = run.objective()
    goal.fault, goal.faulty = fault, (1, 3, 4, 5)
    with pytest.raises(NumericalError, match=r"at most 2 steps may have a loss .*; got 3\."):
        trained(goal, run.folder)
    assert goal.batches == 4


def test_a_validation_that_is_nan_is_never_the_best(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    goal = run.objective()
    reporting(goal, monkeypatch, math.nan, 3.0, math.nan, 2.0, -math.inf, 2.5, math.nan)
    result, seen = trained(goal, run.folder)
    assert (result.progress.best_score, result.progress.best_step) == (2.0, 3)
    assert torch.equal(best(result), seen[3])
    json.dumps(result.progress.curve, allow_nan=False)


def test_a_weight_that_is_infinite_is_never_of_the_best(run: Run) -> None:
    """As by a bad memory cell: every later loss is not finite, and no score is there."""
    goal, config = run.objective(), SHORT.model_copy(update={"max_skipped_steps": STEPS})

    def spoil(progress: Progress) -> None:
        if progress.step == 3:
            with torch.no_grad():
                goal.module.linear_kv.weight[0, 0] = math.inf

    result, _ = trained(goal, run.folder, config, spoil)
    assert (result.progress.skipped, result.progress.best_step <= 3) == (STEPS - 3, True)
    assert bool(torch.isfinite(best(result)).all())
    later = [row for row in result.progress.curve if row["step"] > 3 and "skipped" not in row]
    assert [sorted(row) for row in later] == [["step"]] * (STEPS - 3)


def test_patience_ends_the_run_and_the_best_weights_are_returned(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    goal = run.objective()
    # An equal score is no improvement.
    reporting(goal, monkeypatch, 5.0, 4.0, 4.5, 3.0, 3.0, 3.5)
    result, seen = trained(goal, run.folder, SHORT.model_copy(update={"patience": 2}))
    assert result.progress.finished
    assert (result.progress.step, result.progress.best_step, result.progress.stale) == (5, 3, 2)
    assert torch.equal(best(result), seen[3])


def test_a_batch_without_merges_changes_nothing(tmp_path: Path) -> None:
    count = SHORT.batch_size * STEPS  # one epoch
    fourth = batch_indices(SEED, 3, SHORT.batch_size, count)
    run = Run(tmp_path, merges=tuple(index in fourth for index in range(count)))
    result, seen = trained(run.objective(), tmp_path)
    changed = [not torch.equal(a, b) for a, b in pairwise(seen)]
    assert changed == [False, False, False, True, False, False]
    found = [row["aligned_rows"] > 0 for row in result.progress.curve if "aligned_rows" in row]
    assert found == changed
    assert result.progress.skipped == 0


def test_validation_without_merges_is_refused(tmp_path: Path) -> None:
    goal = Run(tmp_path, valid=(False,) * 3).objective()
    with pytest.raises(CorpusError, match="validation needs rows with at least one merge; got"):
        trained(goal, tmp_path)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_the_ranks_share_the_validation_rows_between_them(run: Run, world: int) -> None:
    goal = run.objective()
    shares = [goal.validation_sums(rank, world, 3) for rank in range(world)]
    whole = goal.validation_sums(0, 1, 3)
    assert np.sum(shares, axis=0) == pytest.approx(whole, rel=1e-5)
    assert whole[0] < goal.validation_sums(0, 1, 4)[0]


# Resume states

EVERY = SHORT.model_copy(update={"validate_every": 2})


@pytest.fixture
def whole(tmp_path: Path) -> Run:
    """A run of six steps with a state after each; nothing is trained yet."""
    return Run(tmp_path / "whole", config=EVERY)


def started(run: Run, seed: int = 0) -> tuple[TrainResult, int]:
    """Train, resuming, as a process with that random state; return the steps that it took, too."""
    torch.manual_seed(seed)
    result, objective = train_here(run)
    return result, objective.batches


def interrupted(run: Run, folder: Path, step: int) -> Run:
    """Return the run in a folder of its own, ended from outside right after a step."""
    torch.manual_seed(0)
    again = replace(run, folder=folder)
    train_until(again, step)
    return again


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].detach().flatten() for name in sorted(tensors)])


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (EVERY, {}),
        pytest.param(EVERY.model_copy(update={"checkpoint_every": 2}), {}, marks=pytest.mark.full),
        (EVERY, {"preference": True}),
        (EVERY, {"rule_rows": 2}),
    ],
    ids=["every-step", "every-two", "preference", "rule-rows"],
)
def test_a_run_interrupted_after_any_step_ends_bit_for_bit_the_same(
    whole: Run, tmp_path: Path, config: TrainConfig, more: dict[str, Any]
) -> None:
    whole = replace(whole, config=config, **more)
    undisturbed, _ = started(whole)
    for step in range(1, STEPS):
        again = interrupted(whole, tmp_path / f"stopped-at-{step}", step)
        # no state yet: the run starts afresh, random state included
        result, steps = started(again, seed=int(step >= config.checkpoint_every))
        assert again.final() == whole.final()
        assert result.progress == undisturbed.progress
        assert torch.equal(flat(result.weights), flat(undisturbed.weights))
        # Only the steps after the last state are taken again.
        assert steps == STEPS - step + step % config.checkpoint_every


def test_a_finished_run_trains_no_further_step(
    whole: Run, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = started(whole)
    caplog.clear()
    with caplog.at_level("INFO", "umim.progress"):
        second, steps = started(whole, seed=1)
    told = [one.getMessage() for one in caplog.records if one.name == "umim.progress"]
    assert steps == 0 and told == ["0 steps of 2 rows and 0 validations of 4 rows"]
    assert second.progress == first.progress
    assert torch.equal(flat(second.weights), flat(first.weights))


@pytest.mark.parametrize(
    ("name", "damage", "left"),
    [
        ("rank-0.safetensors", "cut", 3),
        ("rank-0.json", "gone", 3),
        ("manifest.json", "flipped", 3),
        ("manifest.json", "all gone", 0),  # the run starts afresh
    ],
)
def test_a_torn_state_falls_back_to_the_one_before(
    whole: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str, left: int
) -> None:
    started(whole)
    again = interrupted(whole, tmp_path / "torn", 4)
    file = again.folder / "step-00000004" / name
    content = file.read_bytes()
    if "gone" in damage:
        for path in again.folder.glob(f"*/{name}") if damage == "all gone" else [file]:
            path.unlink()
    elif damage == "cut":
        file.write_bytes(content[:-2])
    else:
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    _, steps = started(again, seed=int(left > 0))
    assert "step-00000004 is torn" in caplog.text
    assert steps == STEPS - left
    assert again.final() == whole.final()


def test_two_states_are_kept_and_none_from_a_later_step(whole: Run) -> None:
    (whole.folder / "step-00000005").mkdir(parents=True)  # torn, left by another run
    train_until(whole, 4)
    assert sorted(path.name for path in whole.folder.iterdir()) == [
        "step-00000003",
        "step-00000004",
    ]


def written(whole: Run) -> Path:
    """The state of a rank alone after its third step."""
    objective = whole.objective()
    strategy = make_strategy("ddp", objective, whole.config)
    save(objective, strategy, whole.folder, Progress(step=3), {})
    return whole.folder / "step-00000003"


@pytest.mark.parametrize("missing", ["rank-1.json", "rank-1.safetensors"])
def test_a_state_without_the_files_of_every_rank_counts_for_none(whole: Run, missing: str) -> None:
    state = written(whole)
    assert newest_state(whole.folder, 1) == state and newest_state(whole.folder, 2) is None
    (state / "manifest.json").unlink()
    for file in ("rank-0.json", "rank-0.safetensors"):
        (state / file).with_name(file.replace("0", "1", 1)).write_bytes((state / file).read_bytes())
    (state / missing).unlink()
    with pytest.raises(ArtifactError, match=f"the files of all 2 ranks; got none .* {missing}"):
        commit(state, 2)
    assert not (state / "manifest.json").exists()


def test_a_full_disk_is_named_with_the_file_and_its_bytes(
    whole: Run, small_disk: Callable[[int], Path]
) -> None:
    with pytest.raises(ArtifactError, match=r"rank-0\S+ \(\d+ bytes\) must be .* No space left"):
        written(replace(whole, folder=small_disk(1 << 13), rule_rows=2))


def test_an_epoch_without_merges_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, merges=(False,) * ROWS)
    objective = run.objective()
    strategy = DdpStrategy(objective, run.config)
    with pytest.raises(CorpusError) as caught:
        train(objective, strategy, run.config, seed=SEED, state_dir=run.folder)
    assert str(caught.value) == (
        f"training needs rows with at least one merge; got none in {ROWS} rows. "
        "Lower tau, or use other rules."
    )
    assert objective.batches == -(-ROWS // CONFIG.batch_size)


def test_a_resumed_run_counts_the_merges_before_it(tmp_path: Path) -> None:
    """All merges are in the first batch; a state is saved after the third."""
    count = 2 * CONFIG.batch_size * CONFIG.max_steps
    first = batch_indices(SEED, 0, CONFIG.batch_size, count)
    run = Run(tmp_path, merges=tuple(index in first for index in range(count)))
    train_until(run, CONFIG.checkpoint_every)
    result, objective = train_here(run)
    assert (objective.batches, result.progress.step) == (
        CONFIG.max_steps - CONFIG.checkpoint_every,
        CONFIG.max_steps,
    )
