"""Checkpoints whose configuration was altered on disk, with a manifest that fits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from umim_core.store.artifacts import read_json, write_json, write_manifest


def alter_config(checkpoint: Path, changes: Mapping[str, object]) -> None:
    """Write other values into a checkpoint's config.json."""
    write_json(checkpoint / "config.json", dict(read_json(checkpoint / "config.json")) | changes)
    write_manifest(checkpoint, kind="checkpoint", schema=2, body={})
