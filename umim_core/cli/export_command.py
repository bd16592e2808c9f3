"""``umim export``: write a model whose merged spans are ids, for other engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from umim_core.cli import shared_options as shared
from umim_core.cli.console_output import JsonFlag, emit, log_lines
from umim_core.cli.documented import AtLeast0OrNone, AtLeast1
from umim_core.config.rule_options import RuleOptions
from umim_core.errors import ConfigError, require
from umim_core.text.reading import Reading

_MOST: Final = 65_536  # of a checkpoint's own, each one row of the embedding and one of the head


def export(
    context: typer.Context,
    checkpoint: str,
    out: Annotated[Path, typer.Option()],
    text: list[str] | None = None,
    spans: AtLeast1 = 8192,
    tau: int = shared.of_field(RuleOptions, "tau"),
    protect: list[str] | None = None,
    *,
    read_as: Reading,
    raw_tail: AtLeast0OrNone = None,
    dtype: Literal["published", "float32", "float16", "bfloat16"] = "published",
    gguf: bool = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a Hugging Face directory with one more row for each span.

    Spans of --text hold no digits, unless --protect names other tokens.

    Options:
        checkpoint: A name that umim path lists, a directory or a hub repository; spans must merge
            before the first layer.
        out: Directory to write; must not exist.
        text: Text that spans are chosen on, as umim mine takes it; repeatable (none, the
            checkpoint's own rules are the spans).
        spans: Spans K of --text, each one more row.
        raw_tail: Last tokens of each message that stay raw (the checkpoint's; 16 where it merges
            nothing).
        dtype: Data type of the weights.
        gguf: Write model.gguf, too: for llama.cpp and OpenVINO; not with adapters.
    """
    if not text:
        chosen = ("spans", "tau", "protect")
        shared.refuse_named(context, chosen, "must come with --text FILE, whose spans are chosen")
    from umim_core.mining.mine import mine_rules
    from umim_core.model.umim import UMIM
    from umim_core.rules.ruleset import RuleSet
    from umim_core.serving.model_export import check_exportable, export_model
    from umim_core.store.disk import check_writable
    from umim_core.store.locking import computing
    from umim_core.store.publication import check_absent
    from umim_core.store.scratch import scratch_folder
    from umim_core.text.sources import sources_of

    options = RuleOptions(tau=tau, spans=spans, protect=tuple(protect or ("digits",)))
    check_absent(out)
    check_writable(out)
    log_lines("umim.progress")
    sources = sources_of([tuple(text)] if text else [], read_as)
    umim = UMIM.from_pretrained(checkpoint, dtype=dtype)
    check_exportable(umim.checkpoint.config, gguf=gguf)
    rules = umim.checkpoint.rules
    rule = f"an export without --text must have at most {_MOST:,} rules"
    remedy = "Add --text FILE: its most useful 8,192 spans are chosen."
    few = bool(sources) or len(rules) <= _MOST
    require(few, ConfigError, rule, f"{len(rules):,} of {checkpoint}", remedy)
    out.parent.mkdir(parents=True, exist_ok=True)
    with computing(), scratch_folder(out.parent, out.name) as folder:
        for source in sources:
            mined = folder / "spans"
            mine_rules(source, mined, tokenizer=umim.backbone.name, options=options)
            rules = RuleSet.load(mined)
        export_model(umim, rules, out, raw_tail=raw_tail, gguf=gguf)
    count, rows = len(rules), umim.backbone.vocab_size
    advice = (
        f"Engines must never write the ids from {rows} on: transformers reads suppress_tokens,\n"
        "and docs/engines.md says how to mask them elsewhere."
    )
    if umim.checkpoint.config.adapter_rank:
        advice = f"Only vLLM with the plugin runs it: vllm serve {out} --tokenizer-mode umim"
    lines = [f"{rows:,} rows of the model and {count:,} of spans written to {out}", "", advice]
    sizes = {"spans": count, "vocab_size": rows, "rows": rows + count}
    emit({"out": str(out), **sizes}, lines, as_json)
