"""Every stage on disks that refuse (reliability 24, 25), killed (50), many in one process (27).

The quick set has the stages of mining, whose files are the most.
"""

from __future__ import annotations

import gc
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from transformers import PreTrainedTokenizerBase

from support.faulty_disk import PAGE, Faults, leftovers, published
from support.tiny_mining import NoCluster, TinyCorpus
from support.tiny_pipeline import NOT_EQUAL, Call, Walk, counting_in_process, walk_until
from support.training_processes import exit_codes, start_ranks
from tasks.run.stage import Artifact
from umim_core.errors import ArtifactError

STAGES = (
    "corpus", "task", "tokenize", "count", "filter", "distill", "task-rules", "with-rules", "sft",
    "dpo", "evaluate", "task-score", "benchmark", "report",
)  # fmt: skip


@dataclass(frozen=True)
class Tried:
    """A stage, its undisturbed artifact, and which of its writes fail: every one, or some."""

    run: Callable[[Path], Artifact]
    artifact: Artifact
    every: int = 1

    def check_whole(self, root: Path, where: object) -> None:
        """Run it again, undisturbed: it must end as it did elsewhere and leave nothing else."""
        for path in published(root):
            assert (path / "manifest.json").is_file(), "whole: only the last flush failed"
        digest = self.run(root).digest
        assert self.artifact.stage in NOT_EQUAL or digest == self.artifact.digest, where
        assert leftovers(root) == [], where


@pytest.fixture(scope="module")
def mining(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerBase
) -> Iterator[dict[str, Tried]]:
    made = tmp_path_factory.mktemp("made")
    corpus = TinyCorpus.make(made / "corpus", tiny_tokenizer, 1000)
    with counting_in_process():
        counted = corpus.count(made, NoCluster())
        yield {
            "count": Tried(lambda root: corpus.count(root, NoCluster()), counted, every=7),
            "filter": Tried(
                lambda root: corpus.filter(root, counted), corpus.filter(made, counted)
            ),
        }


def call_of(run: Walk, stage: str) -> Call:
    return next(call for call in run.calls if call.name == stage)


@pytest.fixture(
    params=["count", "filter", *(pytest.param(f"run/{s}", marks=pytest.mark.full) for s in STAGES)]
)
def stage(request: pytest.FixtureRequest, mining: dict[str, Tried]) -> Tried:
    if request.param in mining:
        return mining[request.param]
    call = call_of(request.getfixturevalue("tiny_run"), request.param.removeprefix("run/"))
    return Tried(call.run, call.artifact)


@pytest.mark.full
def test_every_stage_of_the_run_is_tried(tiny_run: Walk) -> None:
    assert {call.name for call in tiny_run.calls} == set(STAGES)


def test_a_full_disk_is_named_with_path_and_bytes_and_the_rerun_succeeds(
    stage: Tried, small_disk: Callable[[int], Path]
) -> None:
    size = sum(path.stat().st_size for path in stage.artifact.path.rglob("*") if path.is_file())
    for share in (0.0, 0.3, 0.6, 0.9):
        root = small_disk(max(PAGE, int(share * size) // PAGE * PAGE))
        with pytest.raises(ArtifactError, match="must be writable; got No space left") as caught:
            stage.run(root)
        found = re.match(rf"{root}/\S+ \(\d+ bytes.*\) must be", str(caught.value))
        assert found, str(caught.value)
        assert published(root) == []
        stage.check_whole(small_disk(1 << 26), share)
        for path in root.iterdir():
            shutil.rmtree(path)


def test_whichever_write_flush_or_rename_fails_the_artifact_is_whole_or_absent(
    stage: Tried, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, refused = Faults(monkeypatch), 0
    for fail_at in range(1, 500, stage.every):
        root = tmp_path / str(fail_at)
        faults.arm(fail_at)
        try:
            stage.run(root)
        except ArtifactError as error:
            assert "must be writable; got Input/output error" in str(error)
            refused += 1
        fired = faults.fired
        faults.arm(0)
        stage.check_whole(root, (fail_at, fired))
        if fired is None:
            break
    else:
        pytest.fail("every run failed")
    assert refused >= 3


# What every stage passes on its way to disk; a later stage is killed at the next of them.
POINTS = tuple(
    (f"umim_core.store.publication.{name}", 1, when)
    for name in ("write_manifest", "flush_tree", "flush")
    for when in ("before", "after")
)


@pytest.mark.full
@pytest.mark.parametrize("number", [n for n, name in enumerate(STAGES) if name not in NOT_EQUAL])
def test_a_run_killed_as_a_stage_gets_its_name_ends_with_the_same_digest(
    tiny_run: Walk, tmp_path: Path, number: int
) -> None:
    call, root = call_of(tiny_run, STAGES[number]), tmp_path / "root"
    later = {other.artifact.key for other in tiny_run.calls[tiny_run.calls.index(call) :]}
    shutil.copytree(tiny_run.root, root, ignore=shutil.ignore_patterns(*later))
    recipe, point = tiny_run.recipe.model_dump_json(), POINTS[number % len(POINTS)]
    [code] = exit_codes(start_ranks(tmp_path, 1, walk_until, root, recipe, *point))
    assert code == -signal.SIGKILL, (tmp_path / "rank-0.log").read_text("utf-8")[-2000:]
    assert call.run(root).digest == call.artifact.digest
    # A process killed behind a publication leaves its lock file, which the kernel has freed, and
    # its scratch folder, which whoever makes that name again removes.
    whole = {path.parent for path in root.glob("*/*/manifest.json")}
    left = {name for name in leftovers(root) if ".umim" not in name}
    assert left <= {f"{path.parent.name}/.{path.name}.lock" for path in whole}


@pytest.mark.full
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
