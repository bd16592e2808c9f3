"""``umim import``: a checkpoint from a release of the paper's authors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from umim_core.cli import shared_options as shared
from umim_core.cli.console_output import JsonFlag, emit


def import_release(
    folder: Annotated[Path, typer.Argument(help="Folder that holds merge_module.pt.")],
    backbone: Annotated[str, typer.Option(help="Its model: hub repository, directory or .gguf.")],
    out: shared.OutOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a checkpoint of the paper's form from a release of its authors (Zesearch/Umim-LLM)."""
    from umim_core.checkpoint.checkpoint_index import own_place
    from umim_core.store.publication import check_absent

    place = own_place("imported", out, folder.resolve().name)
    check_absent(place.directory)
    from umim_core.backbone.backbone import load_backbone
    from umim_core.checkpoint.next_steps import after_making
    from umim_core.checkpoint.release import read_release

    release = read_release(folder, load_backbone(shared.from_anywhere(backbone)))
    release.checkpoint.save(place.directory)
    name = place.record(place.directory)
    rules = len(release.checkpoint.rules)
    document: dict[str, object] = {
        "checkpoint": str(place.directory),
        "name": name,
        "rules": rules,
        "left_out": release.special,
    }
    left_out = f"; {release.special:,} with special tokens left out" if release.special else ""
    lines = [
        f"{rules:,} rules{left_out}",
        *after_making(place.directory, name, place.directory),
    ]
    emit(document, lines, as_json)
