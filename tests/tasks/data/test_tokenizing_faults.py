from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.worker_kills import WorkerKiller
from tasks.cluster.lease import ClusterLease
from tasks.data.tokenizing import (
    TokenizerRef,
    TokenJob,
    checked,
    split_jobs,
    tokenize_file,
    tokenize_splits,
    written,
)
from umim_core.backbone.fingerprint import tokenizer_fingerprint
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import ClusterError
from umim_core.store.artifacts import payload_files, sha256_file
from umim_core.store.disk import leave_mark
from umim_core.text.sources import TextFiles

NAME = "umim-docs-llama"


@pytest.mark.full
def test_a_killed_worker_leaves_the_bytes_alone(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number:02}.txt").write_text(f"Return axis {number} of it. " * 40_000)
    source = TextFiles(paths=(f"{tmp_path}/*.txt",))
    reference = TokenizerRef(NAME, None, tokenizer_fingerprint(load_tokenizer(NAME)))
    for job in split_jobs("x", source, tmp_path / "one", reference):
        tokenize_file(job)
    directory = tmp_path / "two"

    def shards_of_other_jobs() -> bool:
        return len(list(directory.glob("*.tokens.npy"))) >= 2

    with ClusterLease(ClusterConfig(cpus=2, workers=0)) as lease:
        lease.ensure()
        with WorkerKiller("ray::_call", ready=shards_of_other_jobs) as killer:
            tokenize_splits({"x": split_jobs("x", source, directory, reference)}, lease)
    assert killer.killed, "a worker was killed"
    found = {name: sha256_file(path) for name, path in payload_files(directory).items()}
    assert found.pop("index.json")
    assert found == {n: sha256_file(p) for n, p in payload_files(tmp_path / "one").items()}


@pytest.fixture
def job(tmp_path: Path) -> TokenJob:
    """A job of a worker that sees the folder of the driver."""
    (tmp_path / "a.txt").write_text("Return the axis of it. " * 100)
    reference = TokenizerRef(NAME, None, tokenizer_fingerprint(load_tokenizer(NAME)))
    source = TextFiles(paths=(str(tmp_path / "a.txt"),))
    (made,) = split_jobs("x", source, tmp_path / "x", reference)
    return replace(made, mark=leave_mark(made.directory))


def test_a_worker_that_does_not_share_the_folder_writes_nothing(
    job: TokenJob, tmp_path: Path
) -> None:
    blind = replace(job, directory=tmp_path / "of its own")
    error = checked(written(blind), blind)
    assert isinstance(error, ClusterError) and "must share the artifact root" in str(error)
    assert not blind.directory.exists()


@pytest.mark.parametrize("damage", ["missing", "torn", "altered"])
def test_a_shard_that_is_not_here_as_its_worker_wrote_it_is_refused(
    job: TokenJob, damage: str
) -> None:
    outcome = written(job)
    whole = checked(outcome, job)
    assert not isinstance(whole, Exception) and whole.tokens > 0
    path = job.directory / whole.parts[0].files[0]
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[:-4] if damage == "torn" else content[:-4] + b"\0\0\0\1")
    error = checked(outcome, job)
    assert isinstance(error, ClusterError)
    assert "as its worker wrote it" in str(error) and str(path) in str(error)
