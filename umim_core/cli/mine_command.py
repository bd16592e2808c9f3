"""``umim mine``: mine merge rules from a corpus."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from umim_core.checkpoint.next_steps import after_mining
from umim_core.cli import shared_options as shared
from umim_core.cli.console_output import JsonFlag, emit, log_lines
from umim_core.config.rule_options import Containment, Overlap, RuleOptions
from umim_core.errors import ConfigError
from umim_core.text.reading import Reading

if TYPE_CHECKING:
    from umim_core.mining.mine import MiningReport


def mine(
    context: typer.Context,
    sources: list[str],
    out: Annotated[Path, typer.Option()],
    tokenizer: str | None = None,
    tau: int = shared.of_field(RuleOptions, "tau"),
    longest: int = shared.of_field(RuleOptions, "longest"),
    segment_length: int = shared.of_field(RuleOptions, "segment_length"),
    spans: int | None = shared.of_field(RuleOptions, "spans"),
    overlap: Overlap | None = shared.of_field(RuleOptions, "overlap", None),
    containment: Containment | None = shared.of_field(RuleOptions, "containment", None),
    source: Annotated[Literal["frequency", "confidence"], typer.Option("--policy")] = "frequency",
    backbone: str | None = None,
    min_probability: float | None = shared.of_field(
        RuleOptions, "min_probability", None, "--confidence"
    ),
    min_documents: int = shared.of_field(RuleOptions, "min_documents"),
    protect: list[str] | None = None,
    *,
    read_as: Reading,
    threads: int | None = shared.of_field(RuleOptions, "threads"),
    max_memory_gib: float | None = shared.of_field(RuleOptions, "max_memory_gib"),
    as_json: JsonFlag = False,
) -> None:
    """Mine merge rules from a corpus and write a rule directory.

    Options:
        sources: Text or JSON Lines (also packed: .gz, .zst, .xz, .bz2) or .parquet files, folders,
            globs and s3:// allowed; a local .npy file of ids; or one Hugging Face data set name.
        out: Rule directory to write; must not exist.
        tokenizer: Known name, directory, .gguf file or hub id; optional for .npy ids.
        source: Frequent spans, or spans that a language model is confident about.
        backbone: Model of the confidence policy; it brings its tokenizer.
    """
    rule = "must come with --policy confidence"
    of_other: tuple[str, ...] = ("backbone", "min_probability")
    if source == "confidence":
        of_other = ("tokenizer", "threads", "max_memory_gib")
        rule = "must be left out with --policy confidence: the backbone brings its tokenizer"
    shared.refuse_named(context, of_other, rule)
    options = shared.of_context(context, RuleOptions, {})
    if source == "confidence" and backbone is None:
        raise ConfigError("the confidence policy needs --backbone", "nothing", "Add it.")
    from umim_core.mining.mine import mine_rules
    from umim_core.store.locking import computing
    from umim_core.text.sources import source_of

    log_lines("umim.progress")
    corpus = source_of(sources, read_as)
    model = None
    if backbone is not None:
        from umim_core.backbone.backbone import load_backbone  # imports torch

        model = load_backbone(backbone)
    with computing():
        report = mine_rules(corpus, out, tokenizer=tokenizer, backbone=model, options=options)
    steps = after_mining(out, backbone or tokenizer, sources, read_as)
    emit({"out": str(out)} | asdict(report), [*_lines(report, out), *steps], as_json)


def _lines(report: MiningReport, out: Path) -> list[str]:
    from umim_core.progress import numbered

    lines = [
        f"{report.tokens:,} tokens in {numbered(report.segments, 'segment')}, "
        f"{numbered(report.documents, 'document')}; tau {report.tau}",
        "",
    ]
    steps = {"frequent": report.raw, "overlap": report.overlap, "rules": report.rules}
    shown = {name: counts for name, counts in steps.items() if counts}
    lines.append(f"{'':10}" + "".join(f"{name:>12}" for name in shown))
    lines += [
        f"{f'{n}-grams':10}" + "".join(f"{counts[n]:>12,}" for counts in shown.values())
        for n in report.rules
    ]
    return [*lines, "", f"{sum(report.rules.values()):,} rules written to {out}"]
