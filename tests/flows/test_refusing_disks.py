"""Every stage on disks that refuse (reliability 24, 25), and many runs in one process (27).

The stages of mining are tried with every size of disk in ``tasks/data/test_mining_disk.py``.
"""

from __future__ import annotations

import gc
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from support.faulty_disk import PAGE, Faults, leftovers, published
from support.tiny_pipeline import NOT_EQUAL, Call, Walk
from umim_core.errors import ArtifactError

pytestmark = pytest.mark.full  # a whole run is in its fixture

STAGES = (
    "corpus", "task", "tokenize", "count", "filter", "distill", "task-rules", "with-rules", "sft",
    "dpo", "evaluate", "task-score", "benchmark", "report",
)  # fmt: skip
EVERY_STAGE = pytest.mark.parametrize("stage", STAGES)


def call_of(run: Walk, stage: str) -> Call:
    return next(call for call in run.calls if call.name == stage)


def check_whole(call: Call, root: Path, where: object) -> None:
    """Run the stage again, undisturbed: it must end as it did elsewhere and leave nothing else."""
    digest = call.run(root).digest
    assert call.name in NOT_EQUAL or digest == call.artifact.digest, where
    assert leftovers(root) == [], where


def test_every_stage_of_the_run_is_tried(tiny_run: Walk) -> None:
    assert {call.name for call in tiny_run.calls} == set(STAGES)


@EVERY_STAGE
def test_a_full_disk_is_named_with_path_and_bytes_and_the_rerun_succeeds(
    tiny_run: Walk, small_disk: Callable[[int], Path], stage: str
) -> None:
    call = call_of(tiny_run, stage)
    size = sum(path.stat().st_size for path in call.artifact.path.rglob("*") if path.is_file())
    for share in (0.0, 0.3, 0.9):
        root = small_disk(max(PAGE, int(share * size) // PAGE * PAGE))
        with pytest.raises(ArtifactError, match="must be writable; got No space left") as caught:
            call.run(root)
        found = re.match(rf"{root}/\S+ \(\d+ bytes.*\) must be", str(caught.value))
        assert found, str(caught.value)
        assert published(root) == []
        check_whole(call, small_disk(1 << 26), share)
        for path in root.iterdir():
            shutil.rmtree(path)


@EVERY_STAGE
def test_whichever_write_flush_or_rename_fails_the_artifact_is_whole_or_absent(
    tiny_run: Walk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    call, faults = call_of(tiny_run, stage), Faults(monkeypatch)
    refused = 0
    for fail_at in range(1, 500):
        root = tmp_path / str(fail_at)
        faults.arm(fail_at)
        try:
            call.run(root)
        except ArtifactError as error:
            assert "must be writable; got Input/output error" in str(error)
            refused += 1
        fired = faults.fired
        faults.arm(0)
        for path in published(root):
            assert (path / "manifest.json").is_file(), "whole: only the last flush failed"
        check_whole(call, root, (fail_at, fired))
        if fired is None:
            break
    else:
        pytest.fail("every run failed")
    assert refused >= 3


def test_runs_of_training_and_measuring_stages_leave_nothing_open(
    tiny_run: Walk, tmp_path: Path
) -> None:
    times, process = 60, psutil.Process()
    calls = [call_of(tiny_run, name) for name in ("with-rules", "distill", "evaluate")]

    def held() -> tuple[int, int, int]:
        gc.collect()
        maps = [m.path for m in process.memory_maps(grouped=False)]
        ours = [path for path in maps if "/dev/shm" in path or str(tmp_path) in path]
        return process.num_fds(), process.num_threads(), len(ours)

    after = []
    for number in range(times):
        root = tmp_path / str(number)
        for call in calls:
            assert call.run(root).digest == call.artifact.digest
        shutil.rmtree(root)
        if number in (2, times // 2, times - 1):  # the first runs load and compile
            after.append(held())
    assert len(set(after)) == 1, after
