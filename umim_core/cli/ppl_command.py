"""``umim ppl``: token perplexity and bits per byte of the base model and of UMIM on any corpus."""

from __future__ import annotations

import math
from itertools import islice
from typing import Annotated

import typer

from umim_core.cli.console_output import JsonFlag, emit
from umim_core.cli.prompt_input import (
    CheckpointOption,
    DeviceOption,
    DtypeOption,
    SpecialTokensOption,
)
from umim_core.errors import CorpusError


def ppl(
    files: Annotated[
        list[str],
        typer.Argument(
            help="Text files, .jsonl, .parquet, .npy of token ids, a folder of them, globs, or a "
            "data set by its hub name."
        ),
    ],
    checkpoint: CheckpointOption = None,
    segment_length: Annotated[int, typer.Option(help="Tokens per window.")] = 512,
    context: Annotated[
        int,
        typer.Option(
            min=0, help="Tokens before a window's first scored token, from the window before it."
        ),
    ] = 0,
    max_segments: Annotated[int, typer.Option(min=1, help="Windows at most.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows per forward.")] = 8,
    field: Annotated[str, typer.Option(help="Text field of JSONL, parquet, data sets.")] = "text",
    split: Annotated[str, typer.Option(help="Split of a data set.")] = "test",
    config: Annotated[str | None, typer.Option(help="Configuration of a data set.")] = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    special_tokens: SpecialTokensOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure perplexity per raw token and bits per byte of the base model and of UMIM.

    Windows do not cross documents, and each token is scored once. Text behind the last window is
    not read.
    """
    from umim_core import UMIM
    from umim_core.checkpoint.default_checkpoint import default_checkpoint
    from umim_core.evaluation.perplexity import perplexity
    from umim_core.store.artifacts import finite_or_none
    from umim_core.text.sources import source_of
    from umim_core.text.token_ids import leading_ids
    from umim_core.text.tokens import iter_token_pieces
    from umim_core.text.windows import document_windows, scored_bytes

    source = source_of(tuple(files), field=field, split=split, config=config)
    umim = UMIM.from_pretrained(checkpoint or default_checkpoint(), dtype=dtype, device=device)
    tokenizer = umim.backbone.require_tokenizer()
    lead = leading_ids(tokenizer, special_tokens)
    pieces = iter_token_pieces(source, tokenizer)
    windows = list(islice(document_windows(pieces, segment_length, context, lead), max_segments))
    if not windows:
        raise CorpusError(
            "perplexity needs at least two tokens of a document", "one token", "Give more text."
        )
    rows, given = [window.ids for window in windows], [window.given for window in windows]
    base = perplexity(rows, umim.compressed.base(), batch_size, given=given)
    ours = perplexity(rows, umim.compressed, batch_size, given=given)
    size = scored_bytes(windows, lead, tokenizer)
    ratio, error = ours.increase_over(base)
    document: dict[str, object] = {
        "ppl_base": finite_or_none(base.ppl),
        "ppl_umim": finite_or_none(ours.ppl),
        "bits_per_byte_base": finite_or_none(base.bits_per_byte(size)),
        "bits_per_byte_umim": finite_or_none(ours.bits_per_byte(size)),
        "ppl_ratio": finite_or_none(math.exp(ratio)),
        "ln_ppl_ratio_stderr": error,
        "token_reduction": ours.token_reduction,
        "targets": ours.targets,
        "bytes": size,
        "windows": len(windows),
        "window_tokens": segment_length,
        "context_tokens": context,
        "documents": windows[-1].document + 1,
    }
    spread = "" if error is None else f" ± {math.exp(ratio) * error:.3f}"
    lines = [
        f"{'':6}{'token PPL':>12}{'bits/byte':>12}{'TR':>8}",
        f"{'base':6}{base.ppl:12.3f}{base.bits_per_byte(size):12.4f}{0:8.1%}",
        f"{'UMIM':6}{ours.ppl:12.3f}{ours.bits_per_byte(size):12.4f}{ours.token_reduction:8.1%}",
        f"ratio {math.exp(ratio):.3f}{spread}; {ours.targets:,} tokens ({size:,} bytes) in "
        f"{len(windows)} windows of at most {segment_length} tokens, {context} of context",
    ]
    emit(document, lines, as_json)
