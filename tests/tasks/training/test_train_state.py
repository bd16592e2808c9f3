"""Resume states: a run interrupted after any step, or with a torn state, ends the same bit for bit.

States are compared file by file, so weights, best weights, optimiser, random state and curve are
all in the comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.tiny_training import CONFIG, ROWS, SEED, Run, train_here, train_until
from tasks.training.strategies import DdpStrategy, make_strategy
from umim_core.config.recipe import TrainConfig
from umim_core.errors import ArtifactError, CorpusError
from umim_core.training.train_loop import TrainResult, batch_indices, train
from umim_core.training.train_state import Progress, commit, newest_state, save

STEPS = 6
SHORT = {"max_steps": STEPS, "batch_size": 2, "validate_every": 2, "checkpoint_every": 1}
EVERY = CONFIG.model_copy(update=SHORT)


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


def test_a_finished_run_trains_no_further_step(whole: Run) -> None:
    first, _ = started(whole)
    second, steps = started(whole, seed=1)
    assert steps == 0
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
