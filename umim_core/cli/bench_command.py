"""``umim bench``: how much faster a checkpoint is than its base model on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from umim_core.backbone.devices import default_device
from umim_core.cli import shared_options as shared
from umim_core.cli.console_output import JsonFlag, emit, log_lines
from umim_core.config.evaluate import BenchmarkConfig
from umim_core.errors import ConfigError, require

if TYPE_CHECKING:
    from umim_core.throughput.break_even import ThroughputRow

_LENGTHS: Final = (256, 512, 1024)
_LEAST: Final = 8  # tokens of a prompt
_CHARACTERS: Final = 16  # of a text that surely make a token
_MIB: Final = 2**20
_HEAD: Final[tuple[str, ...]] = (
    *("rows x tokens", "rules", "TR", "phase", "base tok/s", "UMIM tok/s"),
    *("speed-up", "bound", "ms", "KV MiB"),
)
_CAPTION: Final = (
    "Tokens are original tokens; matching and merging are part of UMIM's time. ms of prefill:",
    "time to the first token. KV: keys and values at the end of the phase. Speed-up: median of",
    "the pairs and quartiles; bound: by the operations and bytes that this TR saves.",
)


def bench(
    context: typer.Context,
    *,
    model: shared.ModelOptions,
    prompt_lengths: Annotated[str | None, typer.Option("--lengths")] = None,
    batch_sizes: str = "1",
    new_tokens: int = 32,
    token_reductions: Annotated[str, typer.Option("--reductions")] = "0.5",  # noqa: S107  no secret
    pairs: int = 5,
    text: Path | None = None,
    device: str | None = None,
    as_json: JsonFlag = False,
) -> None:
    """Time a checkpoint against its base model: prefill, decode, memory and whether it pays.

    Options:
        prompt_lengths: Prompt lengths in tokens (those of 256, 512 and 1024 that fit the model's
            positions).
        batch_sizes: Rows side by side.
        new_tokens: Tokens to generate per row.
        token_reductions: Token reductions of fixed pairs, measured as well as the rules.
        pairs: Alternating pairs of base and UMIM.
        text: UTF-8 text; without it, docstrings of this installation.
    """
    config = shared.of_context(
        context,
        BenchmarkConfig,
        {
            "prompt_lengths": _LENGTHS if prompt_lengths is None else prompt_lengths.split(","),
            "batch_sizes": batch_sizes.split(","),
            "token_reductions": token_reductions.split(","),
            "warmup": 1,
        },
    )
    import numpy as np

    from umim_core.backbone.tokenizer_files import quantisation_note
    from umim_core.embedded.docstring_corpus import held_out_text
    from umim_core.progress import log_progress
    from umim_core.store.locking import measuring
    from umim_core.throughput.break_even import break_even
    from umim_core.throughput.throughput import (
        EVERYWHERE,
        check_protocol,
        measure_throughput,
        tokens_needed,
    )

    told = held_out_text() if text is None else shared.text_of(text, "--text")
    place = default_device() if device is None else device
    umim = model.load(place)
    if prompt_lengths is None:
        config = _fitting(config, umim.backbone.max_positions)
    merge, raw_tail = umim.checkpoint.config.recommended()
    options = replace(EVERYWHERE, merge=merge, raw_tail=raw_tail)
    needed = tokens_needed(config) + config.pairs * config.new_tokens  # that the runs can use
    ids = np.array(umim.backbone.encode(told[: _CHARACTERS * needed])[:needed], dtype=np.int64)
    log_lines("umim.progress")
    see = log_progress("measuring, settings")
    check_protocol(umim.backbone, ids, config)  # before it waits for the machine
    with measuring():
        rows = measure_throughput(umim.merged_model, ids, config, options=options, progress=see)
    tail = f", raw tail {raw_tail}" if raw_tail else ""
    kind = str(umim.backbone.dtype).removeprefix("torch.")
    summary = f"{kind}, merge {merge}{tail}. {_verdict(rows)}"
    document: dict[str, object] = {
        "checkpoint": model.name,
        "device": place,
        "dtype": kind,
        "merge": merge,
        "raw_tail": raw_tail,
        "rows": [asdict(row) for row in rows],
        "break_even": break_even(rows),
        "verdict": summary,
    }
    note = filter(None, [quantisation_note(umim.backbone.name)])
    emit(document, [*_table(rows), "", *_CAPTION, "", summary, *note], as_json)


def _fitting(config: BenchmarkConfig, positions: int | None) -> BenchmarkConfig:
    """Return the protocol with the lengths that fit some positions, else the longest there is."""
    if positions is None:
        return config
    room = positions - config.new_tokens + 1  # the last token is never fed
    rule = f"--new-tokens must leave a prompt {_LEAST} of the model's {positions:,} positions"
    require(room >= _LEAST, ConfigError, rule, config.new_tokens, "Lower it.")
    fitting = tuple(length for length in config.prompt_lengths if length <= room)
    return config.model_copy(update={"prompt_lengths": fitting or (room,)})


def _table(rows: Sequence[ThroughputRow]) -> list[str]:
    table, shown = [_HEAD], ("", "")
    for row in rows:
        setting = (f"{row.batch_size} x {row.prompt_tokens:,}", row.label)
        cells = (
            *(("", "") if setting == shown else setting),
            f"{row.token_reduction:.1%}",
            row.phase,
            f"{row.base_tokens_per_s:,.0f}",
            f"{row.umim_tokens_per_s:,.0f}",
            f"{row.speedup:.2f} ({row.speedup_low:.2f}-{row.speedup_high:.2f})",
            f"{row.bound:.2f}",
            f"{1e3 * row.base_seconds:,.1f} / {1e3 * row.umim_seconds:,.1f}",
            f"{row.base_kv_bytes / _MIB:,.1f} / {row.umim_kv_bytes / _MIB:,.1f}",
        )
        table, shown = [*table, cells], setting
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = (zip(cells, widths, strict=True) for cells in table)
    return ["  ".join(f"{cell:>{width}}" for cell, width in line) for line in lines]


def _verdict(rows: Sequence[ThroughputRow]) -> str:
    """Return in one sentence what the checkpoint's own rules give at the longest prompt."""
    from umim_core.throughput.break_even import pays_from

    batch = rows[0].batch_size
    own = [row for row in rows if row.rules == "natural" and row.batch_size == batch]
    own.sort(key=lambda row: row.prompt_tokens)
    by_phase = {row.phase: row for row in own}  # the longest prompt comes last
    prefill, decode, request = (by_phase[phase] for phase in ("prefill", "decode", "request"))
    start = pays_from([row for row in own if row.phase == "request"])
    pays = "did not pay" if start is None else f"paid from {start:,} prompt tokens on"
    return (
        f"With {prefill.prompt_tokens:,} prompt tokens and {prefill.new_tokens} new ones (batch "
        f"size {batch}), the checkpoint's rules save {prefill.token_reduction:.0%} of the prompt: "
        f"{prefill.speedup:.2f}x to the first token, {decode.speedup:.2f}x while decoding, "
        f"{request.speedup:.2f}x in all; here UMIM {pays}."
    )
