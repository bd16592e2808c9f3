"""``umim path``: directories of checkpoints and backbones by name, and of lm-eval's tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from umim_core.checkpoint.next_steps import TASKS_FOLDER
from umim_core.checkpoint.own_checkpoints import artifact_root, own_checkpoint, own_checkpoints
from umim_core.cli.console_output import JsonFlag, emit
from umim_core.embedded.assets import Part, embedded_names, embedded_path
from umim_core.errors import ConfigError, did_you_mean
from umim_core.packages.packaged_model import PACKAGED


def path(
    name: Annotated[
        str | None,
        typer.Argument(help="A name, or the first digits of a stage's key; all if left out."),
    ] = None,
    part: Annotated[Part, typer.Option(help="Which directory.")] = "checkpoint",
    tasks: Annotated[
        bool, typer.Option("--tasks", help="Print the folder for lm-eval's --include_path.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print the directory of a checkpoint or backbone, or list all by name.

    Licence and origin of a packaged model are printed on stderr, and are fields with --json.
    """
    if tasks:
        emit({"tasks": str(TASKS_FOLDER)}, [str(TASKS_FOLDER)], as_json)
        return
    if name is None:
        places = _all(part)
        width = max(map(len, places), default=0)
        lines = [f"{known:<{width}}  {place}" for known, place in places.items()]
        emit({"part": part, "paths": {k: str(v) for k, v in places.items()}}, lines, as_json)
        return
    place = _place(name, part)
    document: dict[str, object] = {"name": name, "part": part, "path": str(place)}
    if part == "backbone" and name in PACKAGED.names():
        model = PACKAGED.find(name)
        document |= {"licence": model.licence, "origin": model.origin}
        if not as_json:
            typer.echo(f"{model.licence}; {model.origin}", err=True)
    emit(document, [str(place)], as_json)


def _all(part: Part) -> dict[str, Path]:
    """Return what is on this machine."""
    shipped = {name: embedded_path(name, part) for name in embedded_names(part)}
    places = {name: place for name, place in shipped.items() if place is not None}
    return places | (own_checkpoints() if part == "checkpoint" else _fetched())


def _fetched() -> dict[str, Path]:
    """Return the packaged models that are in the cache."""
    from umim_core.packages.model_cache import model_directory, model_fault

    models = [PACKAGED.find(name) for name in PACKAGED.names()]
    return {model.name: model_directory(model) for model in models if model_fault(model) is None}


def _place(name: str, part: Part) -> Path:
    place = embedded_path(name, part)
    if place is None and part == "checkpoint":
        place = own_checkpoint(name)
    if place is None and part == "backbone" and name in PACKAGED.names():
        from umim_core.packages.model_cache import packaged_directory

        place = packaged_directory(name, local_files_only=True)
    if place is None:
        known = _all(part)
        backbone = part == "checkpoint" and name in PACKAGED.names()
        raise ConfigError(
            f"a name must be one of {', '.join(known)}",
            name,
            "It is a backbone: add --part backbone."
            if backbone
            else did_you_mean(name, known) or f"Others are looked for under {artifact_root()}.",
        )
    if not place.is_dir():
        raise ConfigError(
            f"{name} must hold a {part}", f"none at {place}", "Make it again, or install it again."
        )
    return place
