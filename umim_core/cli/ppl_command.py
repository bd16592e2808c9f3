"""``umim ppl``: token perplexity and bits per byte of the base model and of UMIM on any corpus."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from umim_core.cli import shared_options as shared
from umim_core.cli.console_output import JsonFlag, emit
from umim_core.cli.documented import AtLeast1
from umim_core.errors import ConfigError, CorpusError, require
from umim_core.text.reading import Reading


def ppl(
    files: list[str],
    *,
    model: shared.ModelOptions,
    segment_length: Annotated[int, typer.Option(min=2)] = 512,
    context_tokens: Annotated[int, typer.Option("--context", min=0)] = 0,
    max_segments: AtLeast1 = 64,
    batch_size: AtLeast1 = 8,
    prompt: bool = False,
    read_as: Reading,
    device: str = "cpu",
    as_json: JsonFlag = False,
) -> None:
    """Measure perplexity per raw token and bits per byte of the base model and of UMIM.

    Windows do not cross documents, and each token is scored once. Text behind the last window is
    not read. Whole windows are merged by all rules; with --prompt only their first halves, as in
    generate.

    Options:
        files: Text files, .jsonl, .parquet, .npy of token ids, a folder of them, globs, or a data
            set by its hub name.
        segment_length: Tokens per window.
        context_tokens: Tokens before a window's first scored token, from the window before it.
        max_segments: Windows at most.
        batch_size: Windows per forward.
        prompt: Read the first half of each window as a prompt, merged as generate merges it, and
            score the second half, raw.
    """
    from umim_core.text.sources import source_of

    source = source_of(tuple(files), read_as)
    if source.kind == "dataset" and read_as.split is None:
        source = source.model_copy(update={"split": "test"})
    from umim_core.evaluation.windows import document_windows, scored_bytes, second_halves
    from umim_core.progress import numbered
    from umim_core.text.token_ids import leading_ids
    from umim_core.text.tokens import iter_token_pieces

    known = shared.base_of(model.name)
    lead = leading_ids(known.tokenizer)
    most = segment_length // 2 - len(lead)
    rule = f"--context must be at most {most} with --prompt: only the second half of "
    rule += f"{segment_length} tokens is scored"
    remedy = "Lower it, or use longer windows."
    require(not prompt or context_tokens <= most, ConfigError, rule, context_tokens, remedy)
    pieces = iter_token_pieces(source, known.tokenizer)
    cut = document_windows(pieces, segment_length, context_tokens, lead)
    windows = [window for _, window in zip(range(max_segments), cut, strict=False)]
    del pieces, cut  # rows that were skipped are told now
    rule = "perplexity needs at least two tokens of a document"
    require(bool(windows), CorpusError, rule, "one token", "Give more text.")
    longest = max(len(window.ids) for window in windows)
    rule = f"windows must fit the {known.positions} positions of {known.name}"
    fits = known.positions is None or longest - 1 <= known.positions  # the last token is never fed
    require(fits, ConfigError, rule, f"{longest} tokens", "Lower --segment-length.")
    from umim_core.evaluation.perplexity import perplexity, second_half_perplexity
    from umim_core.evaluation.scoring import Scorer

    umim = model.load(device)
    documents = windows[-1].document + 1
    merged_model, prompts = umim.merged_model, dict[str, object]()
    if prompt:
        merge, raw_tail = umim.checkpoint.config.recommended("prompt")
        windows = second_halves(windows)
        rows = [window.ids for window in windows]
        base, ours = (
            second_half_perplexity(rows, Scorer(side, segment_length), batch_size)
            for side in (merged_model.base(), merged_model.reading(merge, raw_tail))
        )
        prompts = {"merge": merge, "raw_tail": raw_tail}
    else:
        rows, contexts = [window.ids for window in windows], [window.given for window in windows]
        base, ours = (
            perplexity(rows, side, batch_size, given=contexts)
            for side in (merged_model.base(), merged_model)
        )
    size = scored_bytes(windows, lead, known.tokenizer)
    ratio, error = ours.increase_over(base)
    figures = {
        "ppl_base": base.ppl,
        "ppl_umim": ours.ppl,
        "bits_per_byte_base": base.bits_per_byte(size),
        "bits_per_byte_umim": ours.bits_per_byte(size),
        "ppl_ratio": math.exp(ratio),
    }
    document: dict[str, object] = {
        # JSON has no number for what is not finite.
        **{name: value if math.isfinite(value) else None for name, value in figures.items()},
        "ln_ppl_ratio_stderr": error,
        "token_reduction": ours.token_reduction,
        "targets": ours.targets,
        "bytes": size,
        "windows": len(windows),
        "window_tokens": segment_length,
        "context_tokens": context_tokens,
        "documents": documents,
        **prompts,
    }
    spread = "" if error is None else f" ± {math.exp(ratio) * error:.3f}"
    lines = [
        f"{'':6}{'token PPL':>12}{'bits/byte':>12}{'TR':>8}",
        f"{'base':6}{base.ppl:12.3f}{base.bits_per_byte(size):12.4f}{0:8.1%}",
        f"{'UMIM':6}{ours.ppl:12.3f}{ours.bits_per_byte(size):12.4f}{ours.token_reduction:8.1%}",
        f"ratio {math.exp(ratio):.3f}{spread}; {ours.targets:,} tokens ({size:,} bytes) in "
        f"{numbered(len(windows), 'window')} of at most {segment_length} tokens, "
        f"{context_tokens} of context",
    ]
    if prompt:
        lines.append(
            f"second halves of the windows after merged first halves: raw tail {raw_tail}; TR is "
            "that of the first halves"
        )
    emit(document, lines, as_json)
