"""``umim train``: train a merge module for a model, mined rules and text, in one process."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from umim_core.checkpoint.next_steps import BATCH_SIZE, STEPS
from umim_core.cli import shared_options as shared
from umim_core.cli.console_output import JsonFlag
from umim_core.cli.documented import AtLeast1, GivenRules, Seed
from umim_core.config.form import ModuleForm, Positions, Residual, UnitPositions
from umim_core.text.reading import Reading

_FORM: Final = {**shared.FORM, "rule_rows": 2048}


def train(
    context: typer.Context,
    model: str,
    files: list[str],
    rules: GivenRules = Path(),
    *,
    read_as: Reading,
    out: Path | None = None,
    steps: AtLeast1 = STEPS,
    batch_size: AtLeast1 = BATCH_SIZE,
    segment_length: Annotated[int | None, typer.Option(min=8)] = None,
    learning_rate: float = 2e-3,
    module_positions: Positions = shared.of_field(
        ModuleForm, "module_positions", _FORM["module_positions"], "--positions"
    ),
    residual: Residual = shared.of_field(ModuleForm, "residual", _FORM["residual"]),
    rule_rows: int = shared.of_field(ModuleForm, "rule_rows", _FORM["rule_rows"]),
    unit_positions: UnitPositions = shared.of_field(ModuleForm, "unit_positions"),
    merge_depth: int = shared.of_field(ModuleForm, "merge_depth"),
    adapter_rank: int = shared.of_field(ModuleForm, "adapter_rank", _FORM["adapter_rank"]),
    prompt_rows: Annotated[float, typer.Option(min=0.0)] = 0.25,
    copy_rows: Annotated[float, typer.Option(min=0.0)] = 0.25,
    start: str | None = None,
    seed: Seed = 0,
    device: Literal["cpu", "cuda"] | None = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a merge module; killed or stopped, the same command goes on where it was.

    The last tenth of the text, at most 128 rows, is held out: half to choose the best step, half
    for a comparison.

    Options:
        files: Text to train on, as umim mine takes it.
        steps: Optimiser steps.
        batch_size: Rows per step.
        segment_length: Tokens per row; as many as the rules were mined on.
        learning_rate: Of the schedule's top.
        prompt_rows: Share of rows with a merged start, the rest scored.
        copy_rows: Share of rows that repeat their merged half.
        seed: Of weights and data order.
        device: cpu or cuda (a GPU where there is one).
    """
    shared.given_rules(rules)
    from umim_core.checkpoint.checkpoint_index import own_place
    from umim_core.store.publication import check_own
    from umim_core.text.sources import source_of

    target = own_place("trained", out, rules.resolve().name)
    place = target.directory
    check_own(place)
    source = source_of(tuple(map(shared.from_anywhere, files)), read_as)
    from umim_core.backbone.tokenizer_files import quantisation_note
    from umim_core.checkpoint.next_steps import to_compare
    from umim_core.progress import duration
    from umim_core.rules.ruleset import RuleSet
    from umim_core.training.local_training import train_checkpoint

    loaded = RuleSet.load(rules)
    length = segment_length or loaded.options.segment_length or shared.SEGMENT_LENGTH
    # More rows would take a short run longer than its training.
    plan = {"apart": 50, "rows": 32, "patience": 8, "max_tokens": length}
    job = shared.training_job(context, {}, loaded.longest, **plan)
    began = time.perf_counter()
    with shared.resumable():
        summary = train_checkpoint(replace(job, rules=str(rules.resolve())), source, place)
    lines = [
        *filter(None, [quantisation_note(model)]),
        f"{summary['steps']:.0f} steps in {duration(time.perf_counter() - began)}; held-out KL "
        f"from the base model {summary['kl_first']:.3f} -> {summary['kl_best']:.3f} nats, best at "
        f"step {summary['best_step']:.0f}",
    ]
    recipe = place / "recipe.yaml"
    compared = ["", *to_compare(recipe)] if recipe.is_file() else []
    shared.emit_checkpoint(target, place / "checkpoint", summary, lines, as_json, compared)
