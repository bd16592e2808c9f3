"""A worker that fails or is killed: its error comes back, or the bytes of the undisturbed run."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import psutil
import pytest

from tasks.cluster.lease import ClusterLease
from tasks.data.token_jobs import TokenizerRef, TokenJob, split_jobs, tokenize_file
from tasks.data.tokenizing import _outcome, _result, tokenize_splits
from umim_core.backbone.fingerprint import tokenizer_fingerprint
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import ConfigError
from umim_core.store.artifacts import payload_files, sha256_file
from umim_core.text.sources import TextFiles

NAME = "umim-docs-llama"


def kill_a_worker(directory: Path, killed: list[str], stop: threading.Event) -> None:
    """Kill one worker that runs a job, once shards of other jobs are there."""
    while not stop.is_set():
        if len(list(directory.glob("*.tokens.npy"))) >= 2:
            for child in psutil.Process(os.getpid()).children(recursive=True):
                try:
                    title = " ".join(child.cmdline())
                    if title.startswith("ray::Map"):
                        child.kill()
                        killed.append(title)
                        return
                except psutil.NoSuchProcess:
                    continue
        time.sleep(0.01)


@pytest.mark.full
def test_a_killed_worker_leaves_the_bytes_alone(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number:02}.txt").write_text(f"Return axis {number} of it. " * 40_000)
    source = TextFiles(paths=(f"{tmp_path}/*.txt",))
    reference = TokenizerRef(NAME, None, tokenizer_fingerprint(load_tokenizer(NAME)))
    for job in split_jobs("x", source, tmp_path / "one", reference):
        tokenize_file(job)
    killed: list[str] = []
    stop = threading.Event()
    directory = tmp_path / "two"
    thread = threading.Thread(target=kill_a_worker, args=(directory, killed, stop))
    with ClusterLease(ClusterConfig(cpus=2, workers=0)) as lease:
        lease.ensure()
        thread.start()
        try:
            tokenize_splits({"x": split_jobs("x", source, directory, reference)}, lease)
        finally:
            stop.set()
            thread.join()
    assert killed, "a worker was killed"
    found = {name: sha256_file(path) for name, path in payload_files(directory).items()}
    assert found.pop("index.json")
    assert found == {n: sha256_file(p) for n, p in payload_files(tmp_path / "one").items()}


def test_every_typed_error_of_a_worker_comes_back_as_it_was(tmp_path: Path) -> None:
    source = TextFiles(paths=("a.txt",))
    job = TokenJob("x", 0, source, tmp_path, TokenizerRef(NAME, None, ""), shard_tokens=0)
    error = _result(_outcome(job))
    assert type(error) is ConfigError
    assert str(error) == "shard_tokens must be at least 1; got 0"
