"""Paths of the assets that ship inside the wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

Asset = Literal["checkpoint", "backbone"]
_ASSETS: Final = Path(__file__).parent / "assets"


def embedded_names(part: Asset = "backbone") -> list[str]:
    """Return the names of the embedded backbones or checkpoints.

    Both ship for a backbone of ours; of a packaged one only the checkpoint does.
    """
    return sorted(path.parent.name for path in _ASSETS.glob(f"umim-*/{part}") if path.is_dir())


def embedded_path(name: str, part: Asset) -> Path | None:
    """Return the directory of an embedded asset, or None if ``name`` is not embedded."""
    return _ASSETS / name / part if name in embedded_names(part) else None
