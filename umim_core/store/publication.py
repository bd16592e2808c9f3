"""Directories that are built once, found by what they were made from, and whole or absent.

::

    NAME                 with manifest.json, which is written last
    .NAME.lock           while it is built: one builder at a time
    .NAME.<hex>.umim/    what is being built, if it cannot be resumed; swept once its maker is dead
    NAME.partial/        what is being built, if it can be resumed
        umim.json        our mark: what is built, and the key of what decides it
        whole/           what gets the name; its folder ``state`` stays behind
        state/           the resume state, between the manifest and the name
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from umim_core.errors import ArtifactError, require
from umim_core.store.artifacts import MANIFEST, read_json, read_manifest, write_json, write_manifest
from umim_core.store.disk import REMEDY, flush, flush_tree, refusals_named, unwritable
from umim_core.store.locking import directory_lock
from umim_core.store.scratch import remove_marked, scratch_folder, sweep

STATE: Final = "state"  # finished parts and resume state, in the directory that is being built
MARK: Final = "umim.json"
_WHOLE: Final = "whole"
_ANOTHER: Final = "Remove it, or choose another name."
logger = logging.getLogger("umim.store")


class Built(NamedTuple):
    """A directory that is there: its manifest, and whether this call built it."""

    record: Mapping[str, Any]
    executed: bool


def build_once(
    place: Path,
    key: str,
    build: Callable[[Path], Mapping[str, object] | None],
    *,
    kind: str,
    schema: int,
    look: Callable[[Path], Mapping[str, object]] | None = None,
    resumable: bool = False,
    rebuild: Literal["torn", "damaged"] | None = None,
    wait_seconds: float | None = None,
    remedy: str = REMEDY,
) -> Built:
    """Return the directory of a key, building it if it is not there.

    Args:
        place: Where it must appear.
        key: SHA-256 of all that decides it; recorded in its manifest.
        build: Fills the directory that it is handed, and may return further fields of the
            manifest. A resumable one finds there what a killed call left, and keeps what it needs
            to go on in the folder ``state``, which is no part of the result.
        kind: What the manifest says that it is.
        schema: Version of its layout.
        look: Reads and checks the manifest of a directory that is there, in place of
            ``read_manifest``.
        resumable: Whether a killed call leaves ``NAME.partial``, for the same call to go on with.
        rebuild: What is built again instead of being an error: a directory without a manifest, or
            also a damaged one and one of another key. What has no manifest is moved aside, never
            removed.
        wait_seconds: How long to wait for another builder; None: without limit.
        remedy: What to do where the disk refuses.
    """
    place = place.resolve()  # "." and dangling links have no name of their own
    mark = {"kind": kind, "key": key}
    partial = place.with_name(f"{place.name}.partial")

    def found() -> Built | None:
        torn = rebuild == "torn" and place.is_dir() and not (place / MANIFEST).exists()
        if torn or not os.path.lexists(place):
            return None
        try:
            record = look(place) if look else read_manifest(place, kind=kind, schema=schema)
            rule = f"{place} must be the result of this very call"
            known = record.get("key") == key
            require(known, ArtifactError, rule, "one with other settings or inputs", _ANOTHER)
        except ArtifactError as error:
            if rebuild != "damaged":
                raise
            logger.warning("%s is built again: %s", place.name, error)
            return None
        if resumable and _mark(partial) == mark:  # of a call killed once it was published
            remove_marked(partial, MARK)
        return Built(record, executed=False)

    with suppress(FileNotFoundError):  # of what another builder removes at this moment
        if (built := found()) is not None:  # no lock: the folder may be read-only
            return built
    with refusals_named(place, remedy), directory_lock(place, wait_seconds=wait_seconds):
        if (built := found()) is not None:
            return built
        _check_outside(place)
        make_way(place)
        fresh = scratch_folder(place.parent, place.name)
        with _resumed(partial, mark) if resumable else fresh as out:
            with refusals_named(place, remedy, out):
                body = {"key": key, **(build(out) or {})}
            for folder in (out, *(path for path in out.rglob("*") if path.is_dir())):
                sweep(folder, None)  # of killed calls
            if (out / STATE).is_dir():
                (out / STATE).rename(out.parent / STATE)
            digest = write_manifest(out, kind=kind, schema=schema, body=body)
            give_name(out, place)
    return Built({**body, "digest": digest}, executed=True)


def check_absent(out: Path, what: str = "directory") -> None:
    """Refuse an output that exists or has no possible name, before hours of counting."""
    place = out.resolve()
    try:
        os.lstat(place.parent / f".{place.name}.lock")
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a name that is too long, say
        raise unwritable(out, 0, error) from error
    _check_outside(out)
    rule = f"the output {what} must not exist"
    remedy = "Remove it or choose another name; results are never overwritten."
    require(not os.path.lexists(out), ArtifactError, rule, str(out), remedy)


def check_own(out: Path) -> None:
    """Refuse an output that exists and is no result, which is found or refused by its key."""
    if not _is_result(out):
        check_absent(out)


def _check_outside(out: Path) -> None:
    """Refuse a place in a finished result: what its manifest does not list would spoil it."""
    result = next((folder for folder in out.resolve().parents if _is_result(folder)), None)
    rule = "an output directory must not lie in another result"
    require(result is None, ArtifactError, rule, str(out), f"Choose a place outside of {result}.")


def _is_result(folder: Path) -> bool:
    try:
        known = read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else None
    except ArtifactError:  # another program's file of this name
        return False
    return isinstance(known, dict) and {"kind", "schema", "files"} <= known.keys()


def publish_directory(final: Path, build: Callable[[Path], None]) -> None:
    """Build a directory next to ``final``, which must not exist, and rename it when it is whole.

    ``build`` fills the empty directory that it is handed, and writes its manifest last.
    """
    final = final.resolve()
    with refusals_named(final), directory_lock(final, wait_seconds=0.0):
        check_absent(final)
        with scratch_folder(final.parent, final.name) as out:
            build(out)
            give_name(out, final)


@contextmanager
def _resumed(partial: Path, mark: Mapping[str, str]) -> Iterator[Path]:
    """Give the folder that a killed call left, or a new one; it stays unless it got its name."""
    if os.path.lexists(partial) and (known := _mark(partial)) != mark:
        finished = [*partial.glob(f"{STATE}/*/{MANIFEST}")]
        finished += partial.glob(f"{_WHOLE}/{STATE}/*/{MANIFEST}")
        rule = f"{partial} must be the unfinished work of this very call"
        found = "something else" if known is None else "work with other settings or inputs"
        require(known is not None and not finished, ArtifactError, rule, found, _ANOTHER)
        remove_marked(partial, MARK)
    if not partial.exists():
        with scratch_folder(partial.parent, partial.name) as begun:
            write_json(begun / MARK, mark)
            (begun / _WHOLE).mkdir()
            give_name(begun, partial)
    out = partial / _WHOLE
    if (partial / STATE).is_dir():  # killed while the result got its name
        (partial / STATE).rename(out / STATE)
    (out / MANIFEST).unlink(missing_ok=True)
    try:
        yield out
    finally:
        if not (out.is_dir() and any(out.iterdir())):
            remove_marked(partial, MARK)


def _mark(partial: Path) -> object:
    """Return the mark of unfinished work; None for what is not ours."""
    try:
        mark = None if partial.is_symlink() else read_json(partial / MARK)
    except ArtifactError:
        return None
    return mark if isinstance(mark, dict) and mark.keys() == {"kind", "key"} else None


def make_way(place: Path) -> None:
    """Remove a directory with a manifest; what has none may be the user's, and is moved aside."""
    if (place / MANIFEST).is_file():
        shutil.rmtree(place)
    elif os.path.lexists(place):
        place.rename(place.with_name(f"{place.name}.torn-{time.time_ns()}"))


def give_name(out: Path, final: Path) -> None:
    """Rename what is whole, each step on disk before the next."""
    flush_tree(out)
    out.rename(final)
    try:
        flush(final.parent)
    except OSError:
        final.rename(out)  # what failed has no final name
        raise


def step_of(state: Path) -> int:
    return int(state.name.removeprefix("step-"))


def last_step(directory: Path) -> int | None:
    """Return the step after which the newest sealed state was written, or None; nothing is read."""
    steps = [step_of(path.parent) for path in directory.glob(f"step-*/{MANIFEST}")]
    return max(steps, default=None)
