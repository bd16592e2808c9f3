from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tasks.stages.generate
from support.tiny_generation import SHARDS, generate, generate_until
from support.training_processes import exit_codes, start_ranks
from support.worker_kills import WorkerKiller
from tasks.cluster.lease import ClusterLease
from tasks.run.stage import Artifact
from umim_core.config.corpus import GeneratedCorpus
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import ArtifactError
from umim_core.synthetic_corpora.questions import TrajectoryRow


@pytest.fixture(scope="module")
def undisturbed(corpus: GeneratedCorpus, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return generate(tmp_path_factory.mktemp("undisturbed"), corpus)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The shards that are written in this process, as they are; each on one thread."""
    numbers: list[int] = []
    write = tasks.stages.generate.write_shard

    def note(folder: Path, number: int, rows: list[TrajectoryRow]) -> None:
        assert torch.get_num_threads() == 1
        write(folder, number, rows)
        numbers.append(number)

    monkeypatch.setattr(tasks.stages.generate, "write_shard", note)
    return numbers


def shards_in(root: Path) -> dict[str, tuple[int, int]]:
    return {
        path.name: (path.stat().st_mtime_ns, path.stat().st_ino)
        for path in root.glob("generate/**/shards/*.jsonl")
    }


def test_a_full_disk_keeps_the_finished_shards(
    corpus: GeneratedCorpus,
    undisturbed: Artifact,
    made: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flush, threads = os.fsync, torch.get_num_threads()
    torch.set_num_threads(3)

    def full(handle: int) -> None:
        if ".000002.jsonl." in os.readlink(f"/proc/self/fd/{handle}"):  # the third shard's scratch
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(handle)

    with monkeypatch.context() as patch, pytest.raises(ArtifactError, match=r"2\.jsonl .*No space"):
        patch.setattr(os, "fsync", full)
        generate(tmp_path, corpus)
    before = shards_in(tmp_path)
    assert sorted(before) == ["000000.jsonl", "000001.jsonl"]
    assert generate(tmp_path, corpus).digest == undisturbed.digest
    assert torch.get_num_threads() == 3
    torch.set_num_threads(threads)
    assert made == [0, 1, 2, 3, 4]
    after = shards_in(tmp_path)
    assert {name: after[name] for name in before} == before, "finished shards are not touched"


# Where the process kills itself, and how many shards are whole by then.
POINTS = {
    "nothing asked": (("tasks.stages.generate.write_selection", 1, "before"), 0),
    "nothing sampled": (("tasks.stages.generate.write_selection", 1, "after"), 0),
    "sampled": (("tasks.stages.generate.write_shard", 3, "before"), 2),
    "not renamed": (("os.fsync", 9, "after"), 2),
    "written": (("tasks.stages.generate.write_shard", 3, "after"), 3),
    "no manifest": (("umim_core.store.publication.write_manifest", 1, "before"), SHARDS),
    "stage not renamed": (("umim_core.store.publication.flush_tree", 2, "after"), SHARDS),
}


@pytest.mark.full
@pytest.mark.parametrize("name", POINTS)
def test_a_killed_run_goes_on_with_the_next_shard(
    corpus: GeneratedCorpus, undisturbed: Artifact, made: list[int], tmp_path: Path, name: str
) -> None:
    point, whole = POINTS[name]
    root = tmp_path / "root"
    run = start_ranks(tmp_path, 1, generate_until, root, corpus.model_dump_json(), *point)
    assert exit_codes(run) == [-signal.SIGKILL], (tmp_path / "rank-0.log").read_text("utf-8")
    before = shards_in(root)
    assert len(before) == whole
    assert generate(root, corpus).digest == undisturbed.digest
    assert made == list(range(whole, SHARDS))
    after = shards_in(root)
    assert {name: after[name] for name in before} == before, "finished shards are not touched"


# Workers


@pytest.fixture(scope="module")
def lease(two_cores: None) -> Iterator[ClusterLease]:
    with ClusterLease(ClusterConfig(cpus=2, workers=2)) as found:
        found.ensure()
        yield found


@pytest.mark.full
def test_a_killed_worker_leaves_the_bytes_alone(
    corpus: GeneratedCorpus, undisturbed: Artifact, lease: ClusterLease, tmp_path: Path
) -> None:
    with WorkerKiller("ray::_call", ready=lambda: shards_in(tmp_path)) as killer:
        found = generate(tmp_path, corpus, lease)
    assert killer.killed, "a worker was killed"
    assert found.digest == undisturbed.digest
