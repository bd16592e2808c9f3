"""Paths of the assets that ship inside the wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

_ASSETS: Final = Path(__file__).parent / "assets"


def embedded_names() -> list[str]:
    """Return the names of the embedded backbones."""
    return sorted(path.name for path in _ASSETS.glob("umim-*") if path.is_dir())


def embedded_path(name: str, part: Literal["backbone", "checkpoint"]) -> Path | None:
    """Return the directory of an embedded asset, or None if ``name`` is not embedded."""
    return _ASSETS / name / part if name in embedded_names() else None
