"""``umim path``: checkpoints by name and their directories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from umim_core.checkpoint.own_checkpoints import artifact_root, own_checkpoint, own_checkpoints
from umim_core.cli.console_output import JsonFlag, emit
from umim_core.embedded.assets import embedded_names, embedded_path
from umim_core.errors import ConfigError, did_you_mean

Part = Literal["checkpoint", "backbone"]


def path(
    name: Annotated[
        str | None,
        typer.Argument(help="A name, or the first digits of a stage's key; all if left out."),
    ] = None,
    part: Annotated[Part, typer.Option(help="Which directory.")] = "checkpoint",
    as_json: JsonFlag = False,
) -> None:
    """Print the directory of a checkpoint or backbone, or list all by name."""
    if name is None:
        found = _all(part)
        width = max(map(len, found), default=0)
        lines = [f"{known:<{width}}  {place}" for known, place in found.items()]
        emit({"part": part, "paths": {k: str(v) for k, v in found.items()}}, lines, as_json)
        return
    place = _place(name, part)
    emit({"name": name, "part": part, "path": str(place)}, [str(place)], as_json)


def _all(part: Part) -> dict[str, Path]:
    shipped = {name: embedded_path(name, part) for name in embedded_names()}
    found = {name: place for name, place in shipped.items() if place is not None}
    return found | (own_checkpoints() if part == "checkpoint" else {})


def _place(name: str, part: Part) -> Path:
    found = embedded_path(name, part)
    if found is None and part == "checkpoint":
        found = own_checkpoint(name)
    if found is None:
        known = _all(part)
        raise ConfigError(
            f"a name must be one of {', '.join(known)}",
            name,
            did_you_mean(name, known) or f"Others are looked for under {artifact_root()}.",
        )
    if not found.is_dir():
        raise ConfigError(
            f"{name} must hold a {part}", f"none at {found}", "Make it again, or install it again."
        )
    return found
