"""``umim mine`` on disks that refuse: nothing half-written, and the same command then succeeds."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.command_line import console
from umim_core.store.artifacts import directory_digest

OPTIONS = ["--segment-length", "20", "--tau", "2", "--json"]
SIZED = re.compile(r"/disk/[^ ]+ \(\d+ bytes[^)]*\) must be writable; got ")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    ids = np.random.default_rng(3).integers(0, 40, 3000)
    np.save(tmp_path / "ids.npy", ids.astype(np.uint16))
    (tmp_path / "disk").mkdir()
    return tmp_path


@pytest.fixture
def mine(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[], tuple[int, str]]:
    """Run ``umim mine`` in this process: exit status and what it says on stderr."""

    umim = console(monkeypatch, capsys)

    def run() -> tuple[int, str]:
        result = umim("mine", corpus / "ids.npy", "--out", corpus / "disk" / "rules", *OPTIONS)
        return result.code, result.err

    return run


def listing(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def reference(corpus: Path, mine: Callable[[], tuple[int, str]]) -> str:
    """Digest of the undisturbed rules; also loads whatever is loaded once."""
    assert mine() == (0, "")
    digest = directory_digest(corpus / "disk" / "rules")
    shutil.rmtree(corpus / "disk" / "rules")
    assert listing(corpus / "disk") == []
    return digest


class KthFails:
    """Let the k-th call below a folder fail like a full disk."""

    def __init__(self, function: Callable[..., Any], k: int, folder: Path) -> None:
        self.function, self.left, self.folder = function, k, str(folder)
        self.fired = False

    def __call__(self, target: Any, *arguments: Any, **options: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
        if path.startswith(self.folder):
            self.left -= 1
            if self.left == 0:
                self.fired = True
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return self.function(target, *arguments, **options)


@contextmanager
def failing_call(name: str, k: int, folder: Path) -> Iterator[KthFails]:
    """Let the k-th call of ``os.<name>`` fail."""
    fault = KthFails(getattr(os, name), k, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, fault)
        yield fault


@contextmanager
def failing_write(k: int, folder: Path) -> Iterator[KthFails]:
    """Let the k-th write into a file fail after half of its bytes."""
    fault = KthFails(lambda *_: None, k, folder)
    plain = io.open

    class HalfWritten(io.FileIO):
        def write(self, data: Any) -> int:
            try:
                fault(self.name)
            except OSError:
                super().write(bytes(data)[: len(bytes(data)) // 2])
                raise
            return super().write(data)

    def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if mode == "wb":
            return io.BufferedWriter(HalfWritten(file, "w"))
        return plain(file, mode, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", opened)
        yield fault


LEAST = {"write": 6, "fsync": 6, "rename": 1, "replace": 4, "mkdir": 3}  # calls that must fail


@pytest.mark.parametrize("kind", LEAST)
def test_the_kth_call_that_fails_leaves_nothing_and_a_rerun_succeeds(
    corpus: Path, mine: Callable[[], tuple[int, str]], kind: str
) -> None:
    digest = reference(corpus, mine)
    disk = corpus / "disk"
    told = 0
    for k in range(1, 100):
        arranged = failing_write(k, disk) if kind == "write" else failing_call(kind, k, disk)
        with arranged as fault:
            code, error = mine()
        if code == 0:
            assert directory_digest(disk / "rules") == digest
            shutil.rmtree(disk / "rules")
            if not fault.fired:
                break
            assert kind == "mkdir", "only a folder that exists need not be made"
            continue
        told += 1
        assert error.startswith("umim: error: "), f"{kind} {k}: {error}"
        assert "No space left on device" in error
        assert str(disk) in error
        assert listing(disk) == [], f"{kind} {k}"
    assert told >= LEAST[kind], "faults fired"
    assert not fault.fired, "and in the end none was left"


def test_files_that_may_not_grow_are_named_with_their_size(
    corpus: Path, mine: Callable[[], tuple[int, str]]
) -> None:
    # The kernel refuses here, whoever writes: Python, numpy or Arrow.
    ids = np.random.default_rng(3).integers(0, 9, 200)
    np.save(corpus / "ids.npy", ids.astype(np.uint16))
    digest = reference(corpus, mine)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit, code, refused = 0, 1, set()
    while code:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            code, error = mine()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        if code:
            assert "File too large" in error
            assert SIZED.search(error), error
            refused.add(Path(error.split(" (")[0]).name)
            assert listing(corpus / "disk") == []
        limit = limit + 40 + limit // 20
    # Small files before large ones: each of these was the first that did not fit.
    assert {"00000-00000.tokens.npy", "rules.parquet"} <= refused
    assert directory_digest(corpus / "disk" / "rules") == digest


SMALL_DISK = """
import contextlib, io, json, os, subprocess, sys
from pathlib import Path
from umim_core.cli.app import main
disk, runs = Path(sys.argv.pop(1)), []
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", disk], check=True)
for size in range(4, 400, 4):
    subprocess.run(["mount", "-o", f"remount,size={size}k", disk], check=True)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(open(os.devnull, "w")):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    runs.append([code, said.getvalue(), sorted(str(path) for path in disk.rglob("*"))])
    if not code:
        break
print(json.dumps(runs))
"""


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(tried, capture_output=True).returncode == 0


@pytest.mark.full
def test_a_full_disk_is_told_and_a_larger_one_suffices(corpus: Path) -> None:
    if not can_mount():
        pytest.skip("no file system can be mounted here")
    disk = corpus / "disk"
    arguments = ["mine", str(corpus / "ids.npy"), "--out", str(disk / "rules"), *OPTIONS]
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", SMALL_DISK, str(disk), *arguments],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    *full, last = json.loads(done.stdout)
    assert len(full) >= 3, "the disk was full at different times"
    for code, error, left in full:
        assert code == 1
        assert error.startswith("umim: error: ")
        assert "No space left on device" in error
        assert left == []
    assert any(SIZED.search(error) for _, error, _ in full)
    assert last[:2] == [0, ""]
    assert str(disk / "rules" / "manifest.json") in last[2]
    assert not [path for path in last[2] if not path.startswith(str(disk / "rules"))]
