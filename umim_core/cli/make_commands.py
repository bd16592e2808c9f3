"""``umim init`` and ``umim import``: checkpoints without any training, in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from umim_core.cli import shared_options as shared
from umim_core.cli.console_output import JsonFlag
from umim_core.cli.documented import GivenRules
from umim_core.config.form import ModuleForm, UnitPositions


def init(
    context: typer.Context,
    model: str,
    rules: GivenRules = Path(),
    out: Path | None = None,
    residual: Literal["last", "exponential"] = "last",
    unit_positions: UnitPositions = shared.of_field(ModuleForm, "unit_positions"),
    merge_depth: int = shared.of_field(ModuleForm, "merge_depth"),
    as_json: JsonFlag = False,
) -> None:
    """Make a checkpoint without training; umim train with the same residual starts from there.

    Options:
        residual: What stands for a span: the embedding of its last token, or an average that weighs
            later tokens more.
    """
    shared.given_rules(rules)
    from umim_core.checkpoint.checkpoint_index import own_place
    from umim_core.store.publication import check_absent

    place = own_place("untrained", out, rules.resolve().name)
    check_absent(place.directory)
    from umim_core.backbone.backbone import load_backbone
    from umim_core.checkpoint.checkpoint import untrained_checkpoint
    from umim_core.rules.ruleset import RuleSet

    form = shared.of_context(context, ModuleForm, {"module_positions": "learned"})
    backbone = load_backbone(shared.from_anywhere(model))
    checkpoint = untrained_checkpoint(backbone, RuleSet.load(rules), form)
    checkpoint.save(place.directory)
    count, what = len(checkpoint.rules), "state" if merge_depth else "embedding"
    span = "its last token" if residual == "last" else "an average of its tokens"
    line = f"{count:,} rules, untrained: a span has the {what} of {span}"
    shared.emit_checkpoint(place, place.directory, {"rules": count}, [line], as_json)


def import_release(
    folder: Path,
    backbone: Annotated[str, typer.Option()],
    out: Path | None = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a checkpoint of the paper's form from a release of its authors (Zesearch/Umim-LLM).

    Options:
        folder: Folder that holds merge_module.pt.
        backbone: Its model: hub repository, directory or .gguf.
    """
    from umim_core.checkpoint.checkpoint_index import own_place
    from umim_core.store.publication import check_absent

    place = own_place("imported", out, folder.resolve().name)
    check_absent(place.directory)
    from umim_core.backbone.backbone import load_backbone
    from umim_core.checkpoint.release import read_release

    checkpoint, special = read_release(folder, load_backbone(shared.from_anywhere(backbone)))
    checkpoint.save(place.directory)
    count = len(checkpoint.rules)
    line = f"{count:,} rules" + (f"; {special:,} with special tokens left out" if special else "")
    document = {"rules": count, "left_out": special}
    shared.emit_checkpoint(place, place.directory, document, [line], as_json)
