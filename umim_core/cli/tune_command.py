"""``umim tune``: a checkpoint for the requests that somebody logs, in one command."""

from __future__ import annotations

import shlex
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from umim_core.cli import shared_options as shared
from umim_core.cli.console_output import JsonFlag, log_lines
from umim_core.cli.documented import AtLeast1, Seed
from umim_core.config.form import ModuleForm
from umim_core.errors import ConfigError, CorpusError, require

if TYPE_CHECKING:
    from umim_core.tuning.tune import Comparison, ReplyChange

_ROLES: Final = ["user", "system", "tools", "tool"]


def tune(
    context: typer.Context,
    model: str,
    logs: list[str],
    out: Path | None = None,
    roles: Annotated[list[str], typer.Option("--role")] = _ROLES,
    spans: AtLeast1 = 8192,
    longest: Annotated[int, typer.Option(min=4, max=16)] = 16,
    steps: AtLeast1 = 120,
    batch_size: AtLeast1 = 2,
    max_tokens: Annotated[int, typer.Option(min=16)] = 1024,
    merge_depth: int = shared.of_field(ModuleForm, "merge_depth", 4),
    adapter_rank: int = shared.of_field(ModuleForm, "adapter_rank", shared.FORM["adapter_rank"]),
    learning_rate: float = 2e-3,
    start: str | None = None,
    kind: Literal["text", "jsonl"] | None = None,
    seed: Seed = 0,
    device: Literal["cpu", "cuda"] | None = None,
    as_json: JsonFlag = False,
) -> None:
    """Choose spans of your requests, train for them, and compare raw and merged prompts.

    Of every conversation the last request is read. Every fifth conversation is held out; at most
    100 of these are compared. The time that all of it takes is told first. Killed or stopped, the
    same command goes on where it was.

    Options:
        logs: Request logs (JSON Lines with messages and tools): files, folders.
        roles: Whose contents merge; may be repeated.
        spans: Most spans.
        longest: Most tokens of one.
        steps: Optimiser steps.
        batch_size: Prompts per step.
        max_tokens: Tokens of a prompt that are trained on at most.
        learning_rate: At the top of its schedule.
        kind: What files hold whose ending is other.
        seed: Of weights and data order.
        device: cpu or cuda (a GPU where there is one).
    """
    from umim_core.backbone.shape import trained_context
    from umim_core.backbone.tokenizer_files import load_tokenizer
    from umim_core.checkpoint.checkpoint_files import read_config
    from umim_core.checkpoint.checkpoint_index import own_place
    from umim_core.progress import counted, logger, numbered
    from umim_core.serving.model_export import check_exportable
    from umim_core.store.publication import check_own
    from umim_core.text.roles import check_roles
    from umim_core.traffic.prompt_rows import prompt_rows
    from umim_core.traffic.requests import Left, read_requests
    from umim_core.tuning.tune import REPLY, TuneOptions
    from umim_core.tuning.tune import tune as tune_checkpoint

    merging = check_roles(roles)
    target = own_place("tuned", out, Path(logs[0]).stem)
    check_own(target.directory)
    # Other engines give units their positions one after the other.
    positions = "preserved" if merge_depth else "compact"
    chosen = {"adapter_rank": adapter_rank, "rule_rows": spans, "unit_positions": positions}
    plan = {"apart": steps, "rows": 8, "patience": 4, "max_tokens": max_tokens}
    job = shared.training_job(context, shared.FORM | chosen, longest, **plan)
    left = Left()
    log_lines("umim.progress")
    requests = list(counted(read_requests(tuple(logs), kind, left), "requests read"))
    tokenizer, most = load_tokenizer(model), trained_context(model)
    # A prompt is answered with REPLY tokens, too.
    written = prompt_rows(requests, tokenizer, merging, left, most, REPLY)
    rows = list(counted(written, "prompts read"))
    rule = "logs must hold requests that the model's template writes"
    found = left.lines()
    remedy = "Log other requests, or name a model with a chat template."
    require(bool(rows), CorpusError, rule, "; ".join(found) or "none", remedy)
    for line in [f"{numbered(len(rows), 'request')} to tune on", *left.lines("not counted: ")]:
        logger.info("%s", line)  # before hours of training
    options = TuneOptions(job, merging, spans, longest)
    began = time.monotonic()
    with shared.resumable():
        compared = tune_checkpoint(rows, options, target.directory)
    document = {**asdict(compared), "left_out": dict(left.reasons)}
    lines = _lines(compared, time.monotonic() - began)
    place, checkpoint = target.directory, target.directory / "checkpoint"
    export: list[str] = []
    with suppress(ConfigError):  # other engines do not read every checkpoint
        check_exportable(read_config(checkpoint))
        exported = str(place.with_name(f"{place.name}-exported"))
        export.append(f"  {shlex.join(['umim', 'export', str(place), '--out', exported])}")
    shared.emit_checkpoint(target, checkpoint, document, lines, as_json, export, to_serve=True)


def _lines(compared: Comparison, seconds: float) -> list[str]:
    from umim_core.progress import duration
    from umim_core.tuning.tune import LEAST_AGREEMENT, MOST_NATS

    lines = [f"tuned in {duration(seconds)}"]
    if compared.trials:
        lines += [
            "",
            "spans of at least so many tokens, on conversations that validated the training",
            f"{'shortest':>10}{'spans':>8}{'saved':>9}{'nats a reply token':>22}{'agreement':>12}",
            *(
                f"{trial.shortest:>10}{trial.spans:>8,}{trial.saved:>9.1%}"
                f"{_nats(trial.replies):>22}{trial.replies.agreement:>12.1%}"
                f"{'  chosen' if trial.shortest == compared.shortest else ''}"
                for trial in compared.trials
            ),
        ]
        if not compared.trials[-1].replies.keeps:
            lines.append(
                f"None keeps the replies (at most {MOST_NATS:g} times the nats, agreement of at "
                f"least {LEAST_AGREEMENT:.0%}): the longest spans are taken. More --steps may help."
            )
    lines += [
        "",
        f"held-out conversations  {compared.requests:>8,}   with a reply",
        f"prompt tokens saved     {compared.saved:>8.1%}   of {compared.tokens:,}",
    ]
    if compared.replies is not None:
        error = compared.replies.nats_error
        shown = "" if error is None else f" (difference +- {error:.3f})"
        lines += [
            f"nats a reply token      {_nats(compared.replies):>17}{shown}",
            f"tokens they agree on    {compared.replies.agreement:>8.1%}",
        ]
    return [
        *lines,
        f"equal greedy answers    {compared.equal:>5} of {compared.answers}",
        f"first token after       {compared.base_seconds:>8.2f} -> {compared.merged_seconds:.2f} s",
        "",
    ]


def _nats(change: ReplyChange) -> str:
    return f"{change.base_nats:.3f} -> {change.merged_nats:.3f}"
