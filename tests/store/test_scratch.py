"""Scratch beside a target has our mark; anything without it is never touched."""

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.pairwise import pairwise
from umim_core.errors import ArtifactError, LockError
from umim_core.store.arrays import save_array
from umim_core.store.disk import write_bytes
from umim_core.store.publication import build_once, publish_directory
from umim_core.store.scratch import scratch_folder

Command = Callable[[Path], object]


def fill(out: Path) -> None:
    (out / "f").write_text("1")


def resumable(place: Path) -> object:
    return build_once(place, "k", fill, kind="t", schema=1, resumable=True, wait_seconds=0.0)


COMMANDS: dict[str, Command] = {
    "publish": lambda place: publish_directory(place, fill),
    "once": lambda place: build_once(place, "k", fill, kind="t", schema=1),
    "resumable": resumable,
}


def tree(folder: Path) -> dict[str, str]:
    """Return what lies in a folder: the text of files, the targets of links, "/" for folders."""
    return {
        path.relative_to(folder).as_posix(): os.readlink(path)
        if path.is_symlink()
        else path.read_text()
        if path.is_file()
        else "/"
        for path in folder.rglob("*")
    }


NAMES = ["x.partial", "x.tmp", "x.state", ".x.lock", f".x.{'0' * 16}.umim", ".umim-tokens-1"]
# What a user may have put in a place; beside it are a file and a folder.
PLANTED: dict[str, Command] = {
    "folder": lambda place: (place / "state").mkdir(parents=True),
    "file": lambda place: place.write_text("mine"),
    "hard link": lambda place: place.hardlink_to(place.with_name("victim")),
    "link": lambda place: place.symlink_to("victim"),
    "dangling": lambda place: place.symlink_to("nowhere"),
    "folder's link": lambda place: place.symlink_to("victims"),
    "fifo": os.mkfifo,
}


@pairwise(command=list(COMMANDS), kind=list(PLANTED), name=NAMES)
def test_what_is_of_the_user_stays(tmp_path: Path, name: str, kind: str, command: str) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "victims").mkdir()
    PLANTED[kind](tmp_path / name)
    before = tree(tmp_path)
    in_the_way = name == ".x.lock" or (name, command) == ("x.partial", "resumable")
    if in_the_way:
        with pytest.raises((ArtifactError, LockError)):
            COMMANDS[command](tmp_path / "x")
    else:
        COMMANDS[command](tmp_path / "x")
        assert (tmp_path / "x" / "f").read_text() == "1"
    after = tree(tmp_path)
    assert {path: after.get(path) for path in before} == before
    assert {path for path in set(after) - set(before) if not path.startswith("x/")} <= {"x"}


@pytest.mark.parametrize("target", ["f", "folder"])
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path, target: str) -> None:
    code = (
        "import sys, time; from pathlib import Path; from umim_core.store.scratch import *\n"
        "where = Path(sys.argv[1])\n"
        "held = scratch(where, 'f'), scratch_folder(where, 'folder')\n"
        "[one.__enter__() for one in held]\n"
        "print('held', flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None and maker.stdout.readline() == "held\n"
        write: dict[str, Command] = {
            "f": lambda place: write_bytes(place, b"1"),
            "folder": lambda place: publish_directory(place, fill),
        }
        write[target](tmp_path / target)
        assert len(list(tmp_path.glob(".*.umim"))) == 2  # of a process that lives
        (tmp_path / target).rename(tmp_path / "first")
        maker.send_signal(signal.SIGKILL)
    write[target](tmp_path / target)
    left = {"f": ".folder", "folder": ".f"}[target]
    assert [path.name.split(".")[1] for path in tmp_path.glob(".*.umim")] == [left[1:]]


def test_scratch_within_a_resumed_build_is_no_part_of_the_result(tmp_path: Path) -> None:
    def torn(out: Path) -> None:
        out.joinpath("state/part").mkdir(parents=True)
        left = out / f".f.{'0' * 16}.umim"  # as a kill leaves it
        left.mkdir()
        (left / "lock").write_text("scratch of umim\n")
        (left / "whole").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "x", "k", torn, kind="t", schema=1, resumable=True)
    assert (tmp_path / "x.partial/whole/state/part").is_dir()
    resumable(tmp_path / "x")
    assert sorted(tree(tmp_path)) == ["x", "x/f", "x/manifest.json"]


@pytest.mark.parametrize("finished", [True, False])
def test_unfinished_work_of_another_call_is_kept_if_a_part_is_finished(
    tmp_path: Path, finished: bool
) -> None:
    def stopped(out: Path) -> None:
        write_bytes(out / ("state" if finished else "half") / "step-1" / "manifest.json")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "x", "other", stopped, kind="t", schema=1, resumable=True)
    before = tree(tmp_path)
    if finished:
        with pytest.raises(ArtifactError, match="unfinished work of this very call; got work with"):
            resumable(tmp_path / "x")
        COMMANDS["publish"](tmp_path / "x")  # another command of the same name
        assert before.items() <= tree(tmp_path).items()
    else:
        resumable(tmp_path / "x")
        assert sorted(tree(tmp_path)) == ["x", "x/f", "x/manifest.json"] != sorted(before)


def test_scratch_folders_are_private_and_what_they_hold_is_not(tmp_path: Path) -> None:
    with scratch_folder(tmp_path, "x") as whole:
        assert stat.S_IMODE(whole.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(whole.stat().st_mode) == 0o777 & ~_umask()


def _umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


# Files that a user names.


@pytest.mark.parametrize("chain", [1, 3])
@pytest.mark.parametrize("existing", [True, False])
def test_links_are_written_through(tmp_path: Path, existing: bool, chain: int) -> None:
    (tmp_path / "d").mkdir()
    if existing:
        (tmp_path / "d" / "f").write_text("old")
    target = Path("d/f")
    for number in range(chain):
        (tmp_path / f"l{number}").symlink_to(target)
        target = Path(f"l{number}")
    write_bytes(tmp_path / target, b"new")
    assert (tmp_path / target).is_symlink()
    assert (tmp_path / "d" / "f").read_text() == "new"


@pytest.mark.parametrize("write", [write_bytes, lambda path, data: save_array(path, np.ones(3))])
def test_mode_names_and_neighbours_are_kept(
    tmp_path: Path, write: Callable[[Path, bytes], None]
) -> None:
    path = tmp_path / "f"
    path.write_text("old" * 999)
    path.chmod(0o640)
    (tmp_path / "f.tmp").write_text("mine")
    write(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    (tmp_path / "other").hardlink_to(path)
    write(path, b"newer")
    assert (tmp_path / "other").read_bytes() == path.read_bytes()
    assert path.stat().st_nlink == 2
    assert (tmp_path / "f.tmp").read_text() == "mine"
    write(tmp_path / "new", b"x")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o666 & ~_umask()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_owner_is_kept(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")
    os.chown(tmp_path / "f", 1234, 2345)
    write_bytes(tmp_path / "f", b"new")
    status = (tmp_path / "f").stat()
    assert (status.st_uid, status.st_gid) == (1234, 2345)


def test_fifos_and_devices_are_written_into(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "f").read_bytes()))
    reader.start()
    write_bytes(tmp_path / "f", b"data")
    reader.join()
    assert read == [b"data"] and stat.S_ISFIFO((tmp_path / "f").stat().st_mode)
    (tmp_path / "null").symlink_to("/dev/null")
    write_bytes(tmp_path / "null", b"data")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize("to", ["pipe", "file", "link"])
def test_standard_output_keeps_its_order(tmp_path: Path, to: str) -> None:
    name = "/dev/stdout"
    if to == "link":
        (tmp_path / "l").symlink_to("/dev/stdout")
        name = str(tmp_path / "l")
    code = (
        "import sys; from pathlib import Path; from umim_core.store.disk import write_bytes\n"
        "print('before'); write_bytes(Path(sys.argv[1]), b'page\\n'); print('after')\n"
    )
    command = [sys.executable, "-c", code, name]
    if to == "pipe":
        shown = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    else:
        with (tmp_path / "out").open("wb") as out:
            subprocess.run(command, check=True, stdout=out)
        shown = (tmp_path / "out").read_bytes()
    assert shown == b"before\npage\nafter\n"


@pytest.mark.parametrize("name", ["folder", "loop", "full", "file/x", "n" * 300])
def test_what_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "full").symlink_to("/dev/full")
    (tmp_path / "file").write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(ArtifactError, match="must be writable"):
        write_bytes(tmp_path / name, b"data")
    assert tree(tmp_path) == before


def test_two_writers_of_one_file_leave_one_of_both(tmp_path: Path) -> None:
    pages = [bytes([65 + number]) * 100_000 for number in range(4)]

    def write(page: bytes) -> None:
        for _ in range(20):
            write_bytes(tmp_path / "f", page, durable=False)

    writers = [threading.Thread(target=write, args=(page,)) for page in pages]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if (tmp_path / "f").exists():
            assert (tmp_path / "f").read_bytes() in pages
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


# A power cut must not leave a name without its bytes.


class Disk:
    """Notes which files and folders were flushed, and refuses final names to any other.

    Attributes:
        renamed: Names that were given so far.
        flushed_after: Folders that were flushed once a name in them was given.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.renamed: list[str] = []
        self.flushed_after: list[str] = []
        self._flushed: set[int] = set()
        fsync = os.fsync

        def flush(handle: int) -> None:
            fsync(handle)
            self._flushed.add(os.fstat(handle).st_ino)
            if self.renamed:
                self.flushed_after.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)

        monkeypatch.setattr(os, "fsync", flush)
        for name in ("rename", "replace"):
            monkeypatch.setattr(Path, name, self._checked(getattr(Path, name)))

    def _checked(self, give: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def checked(path: Path, target: Path) -> Path:
            within = [path, *path.rglob("*")] if path.is_dir() else [path]
            lost = [file.name for file in within if file.stat().st_ino not in self._flushed]
            assert not lost, f"{target.name} would be there after a power cut, {lost} would not"
            self.renamed.append(target.name)
            return give(path, target)

        return checked


@pytest.mark.parametrize("command", [*COMMANDS, "file"])
def test_what_gets_its_name_is_flushed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    disk = Disk(monkeypatch)
    if command == "file":
        write_bytes(tmp_path / "x", b"1")
    else:
        COMMANDS[command](tmp_path / "x")
        assert tmp_path.name in disk.flushed_after, "the folder that the name is in"
    assert disk.renamed[-1] == "x"
