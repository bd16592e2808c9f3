"""``umim train``: train a merge module for a model, mined rules and text, in one process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from umim_core.checkpoint.next_steps import BATCH_SIZE, STEPS
from umim_core.cli import shared_options as shared
from umim_core.cli.console_output import JsonFlag
from umim_core.config.form import ModuleForm, Residual, UnitPositions

_FORM: Final = {**shared.FORM, "rule_rows": 2048}


def train(
    context: typer.Context,
    model: shared.ModelArgument,
    files: Annotated[list[str], typer.Argument(help="Text to train on, as umim mine takes it.")],
    rules: shared.RulesOption = Path(),
    *,
    read_as: shared.CorpusOptions,
    out: shared.OutOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = STEPS,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows per step.")] = BATCH_SIZE,
    segment_length: Annotated[
        int | None, typer.Option(min=8, help="Tokens per row; as many as the rules were mined on.")
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Of the schedule's top.")] = 2e-3,
    module_positions: Annotated[
        Literal["none", "learned"],
        typer.Option(
            "--positions",
            help="What the module sees of a token's place in its span; none: the paper.",
        ),
    ] = "learned",
    residual: Residual = shared.of_field(ModuleForm, "residual", _FORM["residual"]),
    rule_rows: int = shared.of_field(ModuleForm, "rule_rows", _FORM["rule_rows"]),
    unit_positions: UnitPositions = shared.of_field(ModuleForm, "unit_positions"),
    merge_depth: int = shared.of_field(ModuleForm, "merge_depth"),
    adapter_rank: int = shared.of_field(ModuleForm, "adapter_rank", _FORM["adapter_rank"]),
    prompt_rows: Annotated[
        float, typer.Option(min=0.0, help="Share of rows with a merged start, the rest scored.")
    ] = 0.25,
    copy_rows: Annotated[
        float, typer.Option(min=0.0, help="Share of rows that repeat their merged half.")
    ] = 0.25,
    start: shared.StartOption = None,
    seed: shared.TrainSeedOption = 0,
    device: shared.TrainDeviceOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Train a merge module; killed or stopped, the same command goes on where it was.

    The last tenth of the text is held out: half to choose the best step, half for a comparison.
    """
    shared.given_rules(rules)
    from umim_core.checkpoint.checkpoint_index import own_place

    target = own_place("trained", out, rules.resolve().name)
    place = target.directory
    from umim_core.backbone.tokenizer_files import quantisation_note
    from umim_core.checkpoint.next_steps import to_compare
    from umim_core.progress import duration
    from umim_core.rules.ruleset import RuleSet
    from umim_core.text.sources import Reading, source_of
    from umim_core.training.local_training import train_checkpoint
    from umim_core.training.train_job import TrainJob

    # More rows would take a short run longer than its training.
    plan = {"apart": 50, "rows": 32, "patience": 8}
    use_gpu, loaded = shared.on_gpu(device), RuleSet.load(rules)
    distillation, form, begin = shared.of_training(context, {}, loaded.longest, **plan)
    places = tuple(map(shared.from_anywhere, files))
    source = source_of(places, Reading(**vars(read_as)))
    job = TrainJob(
        backbone=shared.from_anywhere(model),
        rules=str(rules.resolve()),
        config=distillation,
        form=form,
        max_tokens=segment_length or loaded.options.segment_length or shared.SEGMENT_LENGTH,
        seed=seed,
        use_gpu=use_gpu,
        start=begin,
    )
    began = time.perf_counter()
    with shared.resumable():
        summary = train_checkpoint(job, source, place)
    lines = [
        *filter(None, [quantisation_note(model)]),
        f"{summary['steps']:.0f} steps in {duration(time.perf_counter() - began)}; held-out KL "
        f"from the base model {summary['kl_first']:.3f} -> {summary['kl_best']:.3f} nats, best at "
        f"step {summary['best_step']:.0f}",
    ]
    recipe = place / "recipe.yaml"
    compared = ["", *to_compare(recipe)] if recipe.is_file() else []
    shared.emit_checkpoint(target, place / "checkpoint", summary, lines, as_json, compared)
