"""Identity of the code that a process runs: its checkout, sources, commit and lock of packages."""

from __future__ import annotations

import shutil
import socket
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from tasks.cluster.ray_cluster import CHECKOUT
from umim_core.store.artifacts import canonical_json, sha256_bytes, sha256_file

_SOURCES: Final = ("umim_core", "tasks", "flows")
_LOCK: Final = Path("requirements/lock.txt")
_GIT_SECONDS: Final = 10


@dataclass(frozen=True)
class CodeIdentity:
    """Identity of the code that a process runs.

    Attributes:
        checkout: Folder that holds the packages.
        sources: SHA-256 of their Python files.
        commit: Commit of the checkout; empty outside git.
        lock: SHA-256 of the list of packages that the code is tested with; empty if absent.
        host: Name of the machine.
    """

    checkout: str
    sources: str
    commit: str
    lock: str
    host: str


@cache
def code_identity() -> CodeIdentity:
    """Return the identity of the code that this process has imported."""
    lock = CHECKOUT / _LOCK
    return CodeIdentity(
        str(CHECKOUT),
        sources_digest(CHECKOUT),
        _commit(CHECKOUT),
        sha256_file(lock) if lock.is_file() else "",
        socket.gethostname(),
    )


def sources_digest(checkout: Path) -> str:
    """Return the SHA-256 of all Python files of the packages in a folder."""
    files = sorted(path for name in _SOURCES for path in (checkout / name).rglob("*.py"))
    sums = {path.relative_to(checkout).as_posix(): sha256_file(path) for path in files}
    return sha256_bytes(canonical_json(sums).encode())


def _commit(checkout: Path) -> str:
    git = shutil.which("git")
    if git is None or not (checkout / ".git").exists():
        return ""
    command = [git, "-C", str(checkout), "rev-parse", "HEAD"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS)  # noqa: S603  no argument is anybody's input
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""
