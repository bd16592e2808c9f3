"""Two ranks that see the shared directory differently: they go on alike, or both end in time.

A network file system shows one node an older listing than another, or nothing at all. The paths
here show what such a node would see.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PosixPath

import pytest

from support.tiny_training import Kill, Run, train_rank
from support.training_processes import exit_codes, run_ranks, start_ranks
from tasks.training.strategies import make_strategy
from umim_core.training.train_state import Progress, resume, save

SECONDS = 60.0  # for both to end; a collective that nobody joins waits for half an hour


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


def train_seeing(rank: int, run: Run, odd: int, folder: Path) -> None:
    """Train on one rank; rank ``odd`` uses that folder."""
    train_rank(rank, replace(run, folder=folder) if rank == odd else run)


def resume_seeing(rank: int, run: Run, odd: int, folder: Path) -> None:
    """Save two states, resume and write down from which step; rank ``odd`` sees that folder."""
    objective = run.objective()
    strategy = make_strategy(run.strategy, objective, run.config)
    for step in (3, 6):
        save(objective, strategy, run.folder, Progress(step=step), {})
    progress, _ = resume(objective, strategy, folder if rank == odd else run.folder)
    (run.folder / f"rank-{rank}-resumes").write_text(str(progress.step))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two ranks killed with the states of steps 6 and 9."""
    folder = tmp_path_factory.mktemp("killed")
    run = Run(folder / "state", kills=(Kill(0, 11), Kill(1, 11)))
    codes = exit_codes(start_ranks(folder, 2, train_rank, run))
    assert -9 in codes and 0 not in codes
    assert sorted(path.name for path in run.folder.iterdir()) == ["step-00000006", "step-00000009"]
    return replace(run, kills=())


def copied(killed: Run, place: Path) -> Run:
    shutil.copytree(killed.folder, place / "state")
    return replace(killed, folder=place / "state")


def logs(place: Path) -> list[str]:
    return [(place / f"rank-{rank}.log").read_text("utf-8") for rank in (0, 1)]


@pytest.mark.full
def test_a_rank_that_does_not_see_the_newest_state_resumes_it(tmp_path: Path) -> None:
    run = Run(tmp_path / "state")
    run_ranks(tmp_path, 2, resume_seeing, run, 1, StaleListing(run.folder))
    assert [(run.folder / f"rank-{rank}-resumes").read_text() for rank in (0, 1)] == ["6", "6"]


@pytest.mark.full
def test_a_state_that_one_rank_cannot_read_ends_both(killed: Run, tmp_path: Path) -> None:
    run = copied(killed, tmp_path)
    ranks = start_ranks(tmp_path, 2, train_seeing, run, 1, Unreadable(run.folder))
    assert exit_codes(ranks, SECONDS) == [1, 1]
    rule = "ArtifactError: every rank must be able to read the resume state step-00000009"
    first, second = logs(tmp_path)
    assert f"{rule}; got ranks [1] that cannot. " in first
    assert f"{rule}; got ranks [1] that cannot (" in second
    assert sorted(path.name for path in run.folder.iterdir()) == ["step-00000006", "step-00000009"]
