"""Training processes killed for real: what is left resumes, and nobody waits for the dead.

reliability.md 18 and 20; in one process ``test_train_state.py`` does the same in seconds.

States are compared file by file, so weights, best weights, optimiser, random state, data position
and curve are all in the comparison.
"""

from __future__ import annotations

import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.tiny_training import CONFIG, Kill, Run, train_rank
from support.training_processes import exit_codes, run_ranks, start_ranks

pytestmark = pytest.mark.full
STEPS = 36
PREFERENCE = (False, True)
LONG = CONFIG.model_copy(update={"max_steps": STEPS})
NEVER_ALONE = 60.0  # seconds that a rank may go on after the other one died


def random_kill(seed: int, world: int, kind: signal.Signals = signal.SIGKILL) -> Kill:
    """A kill during one of the steps after the first state, well before the end."""
    rng = np.random.default_rng(seed)
    batch = int(rng.integers(LONG.checkpoint_every + 1, STEPS - 10))
    return Kill(int(rng.integers(world)), batch, float(rng.uniform(0.0, 0.05)), kind)


def resumed_at(log: Path) -> list[int]:
    return [int(step) for step in re.findall(r"resuming at step (\d+)", log.read_text("utf-8"))]


def states(run: Run) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in run.folder.glob("step-*/manifest.json"))


def undisturbed(factory: pytest.TempPathFactory, world: int, **settings: Any) -> Run:
    folder = factory.mktemp("undisturbed")
    run = Run(folder / "state", config=LONG, **settings)
    run_ranks(folder, world, train_rank, run)
    return run


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The undisturbed run of one process."""
    return undisturbed(tmp_path_factory, 1)


@pytest.fixture(scope="module")
def preference_alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The undisturbed preference training of one process."""
    return undisturbed(tmp_path_factory, 1, preference=True)


def check_kill_of_one_process(alone: Run, folder: Path, kill: Kill) -> None:
    run = replace(alone, folder=folder / "state")
    codes = exit_codes(start_ranks(folder, 1, train_rank, replace(run, kills=(kill,))))
    assert codes == [-kill.signal], "the kill did not happen"
    assert states(run)[-1] < STEPS, "it happened after the end"
    left = states(run)[-1]
    run_ranks(folder, 1, train_rank, run)
    assert resumed_at(folder / "rank-0.log") == [left]
    assert run.final() == alone.final()


@pytest.mark.parametrize(
    ("seed", "kind"),
    [*((seed, signal.SIGKILL) for seed in range(6)), (11, signal.SIGTERM), (12, signal.SIGTERM)],
)
def test_a_process_killed_at_a_random_step_resumes_bit_for_bit(
    alone: Run, tmp_path: Path, seed: int, kind: signal.Signals
) -> None:
    check_kill_of_one_process(alone, tmp_path, random_kill(seed, 1, kind))


@pytest.mark.parametrize("seed", [31, 32])
def test_a_preference_training_resumes_with_the_reference_of_its_start(
    preference_alone: Run, tmp_path: Path, seed: int
) -> None:
    check_kill_of_one_process(preference_alone, tmp_path, random_kill(seed, 1))
    log = (tmp_path / "rank-0.log").read_text("utf-8")
    assert log.count("questions of the start") == 1  # before the kill


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Run]:
    """The undisturbed runs of two ranks, by strategy and whether they train preference."""
    return {
        (name, preference): undisturbed(tmp_path_factory, 2, strategy=name, preference=preference)
        for name in ("ddp", "deepspeed")
        for preference in PREFERENCE
    }


@pytest.mark.parametrize("preference", PREFERENCE, ids=["distillation", "preference"])
@pytest.mark.parametrize(
    ("strategy", "seed"),
    [("ddp", 21), ("ddp", 22), ("ddp", 23), ("deepspeed", 24), ("deepspeed", 25)],
)
def test_a_killed_rank_ends_the_other_and_both_resume_bit_for_bit(
    pairs: dict[tuple[str, bool], Run],
    tmp_path: Path,
    strategy: str,
    seed: int,
    preference: bool,
) -> None:
    kill, expected = random_kill(seed, 2), pairs[strategy, preference]
    run = replace(expected, folder=tmp_path / "state")
    ranks = start_ranks(tmp_path, 2, train_rank, replace(run, kills=(kill,)))
    ranks[kill.rank].join(240)
    died = time.monotonic()
    codes = exit_codes(ranks, NEVER_ALONE)
    assert codes[kill.rank] == -signal.SIGKILL, "the kill did not happen"
    assert codes[1 - kill.rank] not in (0, None), "the other rank went on, or hung"
    assert time.monotonic() - died < NEVER_ALONE
    left = states(run)[-1]
    assert left < STEPS
    run_ranks(tmp_path, 2, train_rank, run)
    assert resumed_at(tmp_path / "rank-0.log") == resumed_at(tmp_path / "rank-1.log") == [left]
    assert run.final() == expected.final()
