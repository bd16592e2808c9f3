"""``umim init``: a checkpoint for a model and rules without any training, in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from umim_core.cli import shared_options as shared
from umim_core.cli.console_output import JsonFlag, emit
from umim_core.config.form import ModuleForm, UnitPositions


def init(
    model: shared.ModelArgument,
    rules: shared.RulesOption = Path(),
    out: shared.OutOption = None,
    residual: Annotated[
        Literal["last", "exponential"],
        typer.Option(
            help="What stands for a span: the embedding of its last token, or an average that "
            "weighs later tokens more."
        ),
    ] = "last",
    rule_rows: int = shared.of_field(ModuleForm, "rule_rows"),
    unit_positions: UnitPositions = shared.of_field(ModuleForm, "unit_positions"),
    merge_depth: int = shared.of_field(ModuleForm, "merge_depth"),
    seed: Annotated[int, typer.Option(min=0, help="Of the weights that training starts from.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Make a checkpoint without training; umim train with the same residual starts from there."""
    shared.given_rules(rules)
    from umim_core.checkpoint.checkpoint_index import own_place
    from umim_core.store.publication import check_absent

    target = own_place("untrained", out, rules.resolve().name)
    place = target.directory
    check_absent(place)
    from umim_core.backbone.backbone import load_backbone
    from umim_core.checkpoint.next_steps import after_making
    from umim_core.checkpoint.untrained import untrained_checkpoint
    from umim_core.rules.ruleset import RuleSet

    form = ModuleForm(
        module_positions="learned",
        residual=residual,
        rule_rows=rule_rows,
        unit_positions=unit_positions,
        merge_depth=merge_depth,
    )
    backbone = load_backbone(shared.from_anywhere(model))
    checkpoint = untrained_checkpoint(backbone, RuleSet.load(rules), form, seed)
    checkpoint.save(place)
    name = target.record(place)
    document: dict[str, object] = {
        "checkpoint": str(place),
        "name": name,
        "rules": len(checkpoint.rules),
    }
    what = "state" if merge_depth else "embedding"
    span = "its last token" if residual == "last" else "an average of its tokens"
    lines = [
        f"{len(checkpoint.rules):,} rules, untrained: a span has the {what} of {span}",
        *after_making(place, name, place),
    ]
    emit(document, lines, as_json)
