"""Disks that refuse: full ones, and the k-th write, flush or rename that fails; and 200 runs."""

from __future__ import annotations

import errno
import gc
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from tiny_mining import TAU, InProcess, NoCluster, TinyCorpus
from transformers import PreTrainedTokenizerBase

import tasks.mine
from tasks.corpus import corpus_stage, tokenize_stage
from tasks.stage import Artifact
from umim_core.config import FilesCorpus
from umim_core.errors import ArtifactError
from umim_core.rules.mining import MiningOptions, mine_rules
from umim_core.rules.ruleset import RuleSet
from umim_core.text import TokenIds

PAGE = 4096
Run = Callable[[Path], str]


@pytest.fixture(scope="module")
def corpus(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerBase
) -> TinyCorpus:
    return TinyCorpus.make(tmp_path_factory.mktemp("corpus"), tiny_tokenizer)


@pytest.fixture
def runs(corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Run]:
    """Each writer by name: it writes below a root and returns the digest of what is there."""
    monkeypatch.setattr(tasks.mine, "ClusterCounter", InProcess)
    made = tmp_path / "made"
    counted = corpus.count(made, NoCluster())
    rules = RuleSet.load(corpus.filter(made, counted).path / "rules")
    (tmp_path / "a.txt").write_text(" ".join(f"w{i}" for i in corpus.ids[corpus.ids > 0]))
    text = {"kind": "text", "paths": [str(tmp_path / "a.txt")]}
    config = FilesCorpus.model_validate({s: text for s in ("train", "valid", "test")})
    raw = corpus_stage(made, config)

    def save(root: Path) -> str:
        if not (root / "rules").exists():
            rules.save(root / "rules")
        return RuleSet.load(root / "rules").digest

    return {
        "tokenize": lambda root: (
            tokenize_stage(root, NoCluster(), raw, config, corpus.cell.backbone).digest
        ),
        "count": lambda root: corpus.count(root, NoCluster()).digest,
        "filter": lambda root: corpus.filter(root, counted).digest,
        "rules": save,
    }


def published(root: Path) -> list[Path]:
    """Return the final names below a root."""
    found = [path for path in root.glob("*/*") if re.fullmatch("[0-9a-f]{64}", path.name)]
    return found + list(root.glob("rules"))


def leftovers(root: Path) -> list[str]:
    """Return what is there besides artifacts: locks, drafts, states."""
    paths = {path.relative_to(root).as_posix() for path in root.rglob("*")}
    return [name for name in paths if re.search(r"\.(lock|partial|state|tmp|torn)", name)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Give a function that makes a file system of a size in bytes, or resizes it."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={PAGE}", "tmpfs", str(place)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a tmpfs cannot be mounted here: {error}")

    def resize(size: int) -> Path:
        option = f"remount,size={size}"
        subprocess.run(["mount", "-o", option, str(place)], check=True, capture_output=True)
        return place

    yield resize
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("name", ["tokenize", "count", "filter", "rules"])
def test_a_full_disk_is_named_with_path_and_bytes_and_the_rerun_succeeds(
    runs: dict[str, Run], small_disk: Callable[[int], Path], tmp_path: Path, name: str
) -> None:
    want = runs[name](tmp_path / "undisturbed")
    refused: set[str] = set()
    for pages in range(1, 200):
        root = small_disk(pages * PAGE)
        try:
            assert runs[name](root) == want
            break
        except ArtifactError as error:
            found = re.match(
                r"(/\S+) \(\d+ bytes.*\) must be writable; got No space left", str(error)
            )
            assert found, str(error)
            refused.add(Path(found[1]).name)
        assert published(root) == []
        assert runs[name](small_disk(1 << 24)) == want, "the rerun succeeds"
        assert leftovers(root) == []
        for path in root.iterdir():
            shutil.rmtree(path)
    else:
        pytest.fail("the disk was never large enough")
    assert len(refused) >= 3, refused


class Faults:
    """Let the k-th write, flush or rename of this process fail."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.fail_at = 0
        for name in ("fsync", "rename", "replace", "pwrite"):
            patch.setattr(os, name, self._counted(name, getattr(os, name)))
        patch.setattr(pq, "write_table", self._counted("write", pq.write_table))
        self._open = Path.open
        patch.setattr(Path, "open", lambda path, *args, **rest: self._stream(path, *args, **rest))

    def arm(self, fail_at: int) -> None:
        """Fail at a call, counted from 1."""
        self.calls, self.fail_at = [], fail_at

    @property
    def fired(self) -> str | None:
        """What failed, if anything has."""
        return self.calls[self.fail_at - 1] if 0 < self.fail_at <= len(self.calls) else None

    def _counted(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **rest: object) -> object:
            self.calls.append(name)
            if len(self.calls) == self.fail_at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call(*args, **rest)

        return counted

    def _stream(self, path: Path, mode: str = "r", *args: object, **rest: object) -> IO[bytes]:
        stream = self._open(path, mode, *args, **rest)
        return _Writer(stream, self._counted("write", stream.write)) if "w" in mode else stream


class _Writer:
    """A stream whose writes are counted."""

    def __init__(self, stream: IO[bytes], write: Callable[..., object]) -> None:
        self._stream, self.write = stream, write
        self.flush, self.fileno = stream.flush, stream.fileno

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


@pytest.mark.parametrize(
    ("name", "step"),
    [
        pytest.param("tokenize", 1, marks=pytest.mark.full),
        ("tokenize", 7),
        pytest.param("count", 1, marks=pytest.mark.full),
        ("count", 7),
        ("filter", 1),
        ("rules", 1),
    ],
)
def test_whichever_write_flush_or_rename_fails_the_artifact_is_whole_or_absent(
    runs: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, step: int
) -> None:
    want = runs[name](tmp_path / "undisturbed")
    faults = Faults(monkeypatch)
    refused: set[str | None] = set()
    ignored: set[str | None] = set()
    for fail_at in range(1, 500, step):
        root = tmp_path / str(fail_at)
        faults.arm(fail_at)
        try:
            assert runs[name](root) == want
            ignored.add(faults.fired)
        except ArtifactError as error:
            assert "must be writable; got Input/output error" in str(error)
            refused.add(faults.fired)
        fired = faults.fired
        faults.arm(0)
        for path in published(root):
            assert (path / "manifest.json").is_file(), "whole: only the last flush failed"
        assert runs[name](root) == want, f"rerun after call {fail_at} ({fired}) failed"
        assert leftovers(root) == []
        if fired is None:
            break
    else:
        pytest.fail("every run failed")
    assert refused == {"write", "fsync", "replace", "rename"} if step == 1 else refused
    assert ignored <= {None, "pwrite"}, "only the note in a lock may fail without consequences"


def mined(corpus: TinyCorpus, folder: Path) -> tuple[str, str]:
    """Mine a corpus in this process: by the library, and by the stages."""
    np.save(folder / "ids.npy", corpus.ids.astype(np.uint32))
    source = TokenIds(path=str(folder / "ids.npy"))
    report = mine_rules(
        source, folder / "rules", options=MiningOptions(tau=TAU, segment_length=20, threads=2)
    )
    counted = corpus.count(folder / "root", NoCluster())
    made: Artifact = corpus.filter(folder / "root", counted)
    RuleSet.load(made.path / "rules")
    shutil.rmtree(folder)
    return report.digest, made.digest


@pytest.mark.parametrize("times", [20, pytest.param(200, marks=pytest.mark.full)])
def test_many_runs_in_one_process_leave_nothing_open(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    monkeypatch.setattr(tasks.mine, "ClusterCounter", InProcess)
    process = psutil.Process()

    def held() -> tuple[int, int, int]:
        gc.collect()
        maps = [m.path for m in process.memory_maps(grouped=False)]
        ours = [path for path in maps if "/dev/shm" in path or str(tmp_path) in path]
        return process.num_fds(), process.num_threads(), len(ours)

    digests, after = set(), []
    for number in range(times):
        folder = tmp_path / str(number)
        folder.mkdir()
        digests.add(mined(corpus, folder))
        if number in (2, times // 2, times - 1):  # the first runs load and compile
            after.append(held())
    assert len(digests) == 1
    assert len(set(after)) == 1, after
