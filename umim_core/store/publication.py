"""Atomic publication of directories."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from umim_core.errors import ArtifactError
from umim_core.store.artifacts import write_manifest
from umim_core.store.disk import flush, flush_tree, is_refusal
from umim_core.store.locking import directory_lock

STATE = "state"  # finished parts and resume state, in the directory that is being built


def publish_directory(final: Path, build: Callable[[Path], None]) -> None:
    """Build a directory next to ``final`` and rename it when it is whole.

    Args:
        final: Where the directory must appear; it must not exist yet.
        build: Fills the empty directory that it is handed; writes its manifest last.
    """
    final = final.resolve()  # "." and dangling links have no name of their own
    partial = final.with_name(final.name + ".partial")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with directory_lock(final, wait_seconds=0.0):
            if final.exists():
                raise ArtifactError(
                    "the output directory must not exist",
                    str(final),
                    "Remove it or choose another name; results are never overwritten.",
                )
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                build(partial)
                flush_tree(partial)
                partial.rename(final)
                try:
                    flush(final.parent)
                except OSError:
                    final.rename(partial)  # what failed has no final name
                    raise
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        if not is_refusal(error):
            raise
        raise ArtifactError(
            f"{final} must be writable",
            error.strerror or str(error),
            "Free space or choose another directory.",
        ) from error


def take_back_state(partial: Path, kept: Path) -> None:
    """Let a training go on that was killed while its result got its name."""
    if kept.is_dir():
        kept.rename(partial / STATE)


def publish_result(
    partial: Path, final: Path, kept: Path, *, kind: str, schema: int, body: Mapping[str, object]
) -> str:
    """Give a result its final name; a training's state is no part of it, and kept until then.

    The order, each step on disk before the next::

        partial/state -> kept      manifest      flush      partial -> final      kept is removed

    Returns:
        The digest of the result.
    """
    if (partial / STATE).is_dir():
        (partial / STATE).rename(kept)
    digest = write_manifest(partial, kind=kind, schema=schema, body=body)
    flush_tree(partial)
    partial.rename(final)
    flush(final.parent)
    shutil.rmtree(kept, ignore_errors=True)
    return digest
