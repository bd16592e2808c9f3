"""Training processes killed for real, or blind: what is left resumes, and nobody waits in vain.

reliability.md 18 to 20; in one process ``test_train_loop.py`` does the same in seconds.

States are compared file by file, so weights, best weights, optimiser, random state, data position
and curve are all in the comparison.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import pytest

from support.tiny_training import CONFIG, Kill, Run, train_rank
from support.training_processes import exit_codes, run_ranks, start_ranks
from tasks.training.strategies import make_strategy
from umim_core.training.train_state import Progress, resume, save

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
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Run]:
    """The undisturbed runs of one process, by whether they train preference."""
    return {kind: undisturbed(tmp_path_factory, 1, preference=kind) for kind in PREFERENCE}


@pytest.mark.parametrize(
    ("seed", "kind", "preference"),
    [
        *((seed, signal.SIGKILL, False) for seed in range(6)),
        *((seed, signal.SIGTERM, False) for seed in (11, 12)),
        *((seed, signal.SIGKILL, True) for seed in (31, 32)),
    ],
)
def test_a_process_killed_at_a_random_step_resumes_bit_for_bit(
    alone: dict[bool, Run], tmp_path: Path, seed: int, kind: signal.Signals, preference: bool
) -> None:
    run = replace(alone[preference], folder=tmp_path / "state")
    kills = (random_kill(seed, 1, kind),)
    codes = exit_codes(start_ranks(tmp_path, 1, train_rank, replace(run, kills=kills)))
    assert codes == [-kind], "the kill did not happen"
    assert states(run)[-1] < STEPS, "it happened after the end"
    left = states(run)[-1]
    run_ranks(tmp_path, 1, train_rank, run)
    assert resumed_at(tmp_path / "rank-0.log") == [left]
    assert run.final() == alone[preference].final()
    log = (tmp_path / "rank-0.log").read_text("utf-8")
    assert log.count("questions of the start") == preference  # before the kill


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


# A network file system shows one node an older listing than another, or nothing at all.


class StaleListing(PosixPath):
    """A directory whose newest state is not listed yet."""

    def glob(self, pattern: str) -> Iterator[Path]:
        found = sorted(super().glob(pattern))
        return iter(found[:-1] if pattern == "step-*" else found)


class Unreadable(PosixPath):
    """A directory whose states cannot be read; everything else can."""

    def __fspath__(self) -> str:
        if self.parent.name.startswith("step-") and self.name == "manifest.json":
            raise PermissionError(13, "Permission denied", str(self))
        return super().__fspath__()


def resume_seeing(rank: int, run: Run, folder: Path, torn: str = "") -> None:
    """Save two states, resume and write down from which step; rank 1 sees that folder.

    One bit of the file ``torn`` of the newest state is another one by then.
    """
    objective = run.objective()
    strategy = make_strategy(run.strategy, objective, run.config)
    for step in (3, 6):
        save(objective, strategy, run.folder, Progress(step=step), {})
    if torn and rank == 0:  # the other waits for what this one finds
        file = run.folder / "step-00000006" / torn
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    progress, _ = resume(objective, strategy, folder if rank == 1 else run.folder)
    (run.folder / f"rank-{rank}-resumes").write_text(str(progress.step))


@pytest.mark.parametrize(("torn", "step"), [("", "6"), ("rank-1.safetensors", "3")])
def test_every_rank_resumes_the_newest_state_that_is_whole(
    tmp_path: Path, torn: str, step: str
) -> None:
    run = Run(tmp_path / "state")
    run_ranks(tmp_path, 2, resume_seeing, run, StaleListing(run.folder), torn)
    assert [(run.folder / f"rank-{rank}-resumes").read_text() for rank in (0, 1)] == [step] * 2


def test_a_state_that_one_rank_cannot_read_ends_both(tmp_path: Path) -> None:
    run = Run(tmp_path / "state")
    ranks = start_ranks(tmp_path, 2, resume_seeing, run, Unreadable(run.folder))
    # A collective that nobody joins waits for half an hour.
    assert exit_codes(ranks, NEVER_ALONE) == [1, 1]
    rule = "ArtifactError: every rank must be able to read the resume state step-00000006"
    first, second = ((tmp_path / f"rank-{rank}.log").read_text("utf-8") for rank in (0, 1))
    assert f"{rule}; got ranks [1] that cannot. " in first
    assert f"{rule}; got ranks [1] that cannot (" in second
    assert states(run) == [3, 6]
