"""The folder of a private Ray cluster: short, private, removed at the end; its logs may stay."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tasks.cluster.stopping import FOLDER_PREFIX

# A Unix socket path holds at most 107 bytes; Ray appends up to 64 to its folder
# ("/session_2026-11-20_14-11-39_942048_1234567/sockets/plasma_store").
_MAX_TEMP_DIR_BYTES = 42


@contextlib.contextmanager
def cluster_folder() -> Iterator[Path]:
    """Give a short private folder, and sweep those that killed processes left behind."""
    base = Path(tempfile.gettempdir())
    if len(str(base).encode()) + len(f"/{FOLDER_PREFIX}4194304-12345678") > _MAX_TEMP_DIR_BYTES:
        base = Path("/tmp")  # noqa: S108  the only short name; mkdtemp makes the folder private
    for old in base.glob(f"{FOLDER_PREFIX}*-*"):
        with contextlib.suppress(ValueError, FileNotFoundError):
            pid = int(old.name.split("-")[2])
            if old.stat().st_uid == os.getuid() and not psutil.pid_exists(pid):
                shutil.rmtree(old, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=base))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def keep_logs(logs: Path, place: Path) -> Path | None:
    """Copy Ray's logs, which go with their folder, to a place that stays.

    Args:
        logs: Folder of the log files.
        place: Receives a folder that is named by time and process.

    Returns:
        That folder, or None if nothing could be copied.
    """
    kept = place / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}"
    with contextlib.suppress(OSError):  # files that went meanwhile, a full disk: what can be copied
        shutil.copytree(logs, kept, ignore_dangling_symlinks=True, dirs_exist_ok=True)
    return kept if kept.is_dir() else None
