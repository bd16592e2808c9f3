"""Owner of runs in a tracking store: an artifact root and a user.

One store serves many of both. Runs of equal keys in two roots are two runs, for each root holds
results of its own; so are those of two users who share a root.
"""

from __future__ import annotations

import getpass
import os
import re
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final

from umim_core.store.disk import unwritable, write_bytes
from umim_core.store.locking import directory_lock

ROOT_TAG: Final = "umim.root"
USER_TAG: Final = "mlflow.user"  # MLflow's pages have a column for it
_ROOT_ID: Final = "root-id"
_UNFIT: Final = re.compile(r"[^\w.\-@]+")  # what a query cannot hold
Owner = dict[str, str]


def owner_of(folder: Path) -> Owner:
    """Return the tags by which runs of this user and an artifact root are found.

    Raises:
        ArtifactError: If the disk refuses a new id.
    """
    return {ROOT_TAG: _root_id(folder / _ROOT_ID), USER_TAG: _user()}


def _root_id(path: Path) -> str:
    try:
        with suppress(FileNotFoundError):
            return path.read_text(encoding="ascii")
        with directory_lock(path, wait_seconds=None):
            if not path.is_file():
                write_bytes(path, uuid.uuid4().hex.encode("ascii"))
            return path.read_text(encoding="ascii")
    except OSError as error:
        raise unwritable(path, 0, error) from error


def _user() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        name = str(os.getuid())
    return _UNFIT.sub("_", name)
