"""Finished stages on nodes of a cluster that share no disk with the driver.

A node reads a finished stage from object storage, once, into an ``artifact_root()`` of its own, at
the same path as the driver's. With a local root, or on a disk that all share, nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path

from pydantic import BaseModel

from tasks.storage.remote_root import remote_root
from umim_core.checkpoint.checkpoint_index import artifact_root, remote_address
from umim_core.store.locking import directory_lock


def local_copy(path: Path) -> Path:
    """Return a path, of a finished stage once the stage is on this machine.

    A stage that is not finished, and a path outside the artifact root, are left to the caller.
    """
    root = artifact_root()
    if remote_address() is None or not path.is_relative_to(root) or path.exists():
        return path
    stage, key, *_ = (*path.relative_to(root).parts, "", "")
    remote = remote_root()
    if remote is not None and key and "." not in key:
        with directory_lock(root / stage / f"{key}.fetch", wait_seconds=None):
            if not path.exists():
                remote.fetch(f"{stage}/{key}", root / stage / key)
    return path


def fetch_inputs(job: object) -> None:
    """Bring every finished stage that a job names a path of to this machine.

    Args:
        job: Paths, or absolute names of files, in calls, dataclasses, models, mappings and lists.
    """
    if remote_address() is None:
        return
    if isinstance(job, str | Path):
        if Path(job).is_absolute():
            local_copy(Path(job))
        return
    if isinstance(job, partial):
        job = [*job.args, *job.keywords.values()]
    elif isinstance(job, BaseModel) or (is_dataclass(job) and not isinstance(job, type)):
        job = list(vars(job).values())
    elif isinstance(job, Mapping):
        job = list(job.values())
    if isinstance(job, list | tuple):
        for item in job:
            fetch_inputs(item)
