"""Torn states of two ranks: the newest whole one is used, and the end is the same bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from support.tiny_training import Kill, Run, train_rank
from support.training_processes import exit_codes, run_ranks, start_ranks

pytestmark = pytest.mark.full


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (cut, "rank-0.safetensors"),
    (cut, "rank-1.json"),
    (flip, "rank-1.safetensors"),
    (flip, "rank-0.json"),
    (flip, "manifest.json"),
    (Path.unlink, "rank-1.safetensors"),
    (Path.unlink, "rank-1.json"),
    (Path.unlink, "manifest.json"),
]


@pytest.fixture(scope="module", params=["ddp", "deepspeed"])
def killed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, Run]:
    """An undisturbed run of two ranks, and one killed with the states of steps 6 and 9."""
    folder = tmp_path_factory.mktemp(request.param)
    whole = Run(folder / "whole" / "state", strategy=request.param)
    run_ranks(folder / "whole", 2, train_rank, whole)
    part = replace(whole, folder=folder / "part" / "state", kills=(Kill(0, 11), Kill(1, 11)))
    codes = exit_codes(start_ranks(folder / "part", 2, train_rank, part))
    assert -9 in codes and 0 not in codes
    assert sorted(path.name for path in part.folder.iterdir()) == ["step-00000006", "step-00000009"]
    return whole, part


def test_a_torn_state_of_two_ranks_falls_back_to_the_one_before(
    killed: tuple[Run, Run], tmp_path: Path
) -> None:
    whole, part = killed
    damages = DAMAGES if whole.strategy == "ddp" else [DAMAGES[2], DAMAGES[5]]
    for damage, name in damages:
        place = tmp_path / f"{damage.__name__}-{name}"
        run = replace(whole, folder=place / "state")
        shutil.copytree(part.folder, run.folder)
        damage(run.folder / "step-00000009" / name)
        run_ranks(place, 2, train_rank, run)
        for rank in (0, 1):
            log = (place / f"rank-{rank}.log").read_text("utf-8")
            assert ("state step-00000009 is torn" in log) == (rank == 0), place.name  # it decides
            assert "resuming at step 6" in log, place.name
        assert run.final() == whole.final(), place.name
