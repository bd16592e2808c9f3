"""``umim demo``: base model and UMIM next to each other, on tool schemas and on a document.

Each side reads a long beginning once, and three requests go on from it. A checkpoint that merges
tool schemas, of a model that can call tools, reads twelve schemas; any other one a document.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from umim_core.cli import shared_options as shared
from umim_core.cli.console_output import JsonFlag, emit, write
from umim_core.cli.documented import AtLeast1

if TYPE_CHECKING:
    from umim_core.config.form import Merge
    from umim_core.inference.outputs import Prefix
    from umim_core.model.inputs import PromptInput
    from umim_core.model.umim import UMIM
    from umim_core.text.template_process import Tools

_TOOLS_CHECKPOINT: Final = "umim-qwen-coder-0.5b-tools"
_DOCUMENT: Final = Path(__file__).with_name("demo_document.txt")
_TOOLS: Final = Path(__file__).with_name("demo_tools.json")
_QUESTIONS: Final = (  # and words that a right answer holds
    ("In which month is the workshop closed?", "august"),
    ("What is the most common picture on the lanterns?", "owl"),
    ("Which village is lit by paper lanterns?", "oakhollow"),
)
_TODAY: Final = "Today is Monday, 1 June 2026."
_REQUESTS: Final = (  # the base model gets them right
    ("What will the weather be in Lisbon on 14 June?", "get_weather_forecast lisbon 2026-06-14"),
    ("How many KX-40 are in stock in the harbour warehouse?", "get_stock_level kx-40 harbour"),
    ("Cancel the order B-2207, please: it was the wrong item.", "cancel_order b-2207 wrong_item"),
)
_ROOM: Final = 128  # positions for a question, its answer and a template
_SHOWN: Final = 110  # tokens of the beginning that are shown with their spans
_MIB: Final = 2**20


@dataclass(frozen=True)
class _Reading:
    """What both sides read once: what a user says first, behind tools; and what goes on from it."""

    name: str
    text: str
    tools: Tools | None
    asking: str
    questions: tuple[tuple[str, str], ...]
    new_tokens: int


def demo(
    *,
    model: shared.ModelOptions,
    pairs: AtLeast1 = 2,
    as_json: JsonFlag = False,
) -> None:
    """Put three requests to the base model and to UMIM, in a minute: on tools, on a document.

    Without --checkpoint both are shown; tools need the file of Qwen2.5-Coder-0.5B in the models
    folder, and are left out with --budget or --target-tr. Nothing is trained, and every figure is
    measured now, on this machine's CPU, whatever else runs there; umim bench waits for a quiet
    moment.

    Options:
        pairs: Readings by each side.
    """
    began = time.monotonic()
    say: Callable[[str], None] = (lambda line: None) if as_json else write
    names = [model.name]
    if model == shared.ModelOptions(dtype=model.dtype):  # nothing else is asked for
        names = [*_calling_tools(say), *names]
    parts = []
    for name in names:
        say(f"loading {name}")
        umim = replace(model, checkpoint=name).load("cpu")
        parts.append({"checkpoint": name} | _compare(umim, pairs, say))
    seconds = time.monotonic() - began
    closing = (
        "It pays where prompts are long, or a beginning is kept for many requests; where answers "
        "must be\nthose of the base model, use merge='none'. From which length on: umim bench."
    )
    emit({"parts": parts, "seconds": seconds}, [closing, f"{seconds:.0f} s"], as_json)


def _calling_tools(say: Callable[[str], None]) -> list[str]:
    """Return the checkpoint of tools where the file of its model is, else say what is left out."""
    from umim_core.checkpoint.checkpoint_files import named_config
    from umim_core.model_sources.model_cache import models_root

    file = models_root() / named_config(_TOOLS_CHECKPOINT).backbone
    if file.is_file():
        return [_TOOLS_CHECKPOINT]
    say(
        f"Tools are left out: SmolLM2-135M cannot call them. They come first with {file.name}\n"
        f"(491 MB, from Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF on the hub) in {file.parent}.\n"
    )
    return []


def _compare(umim: UMIM, pairs: int, say: Callable[[str], None]) -> dict[str, object]:
    """Let both sides read the same and answer three requests; say and return what came out.

    Times are medians; the speed-up is the median ratio of alternating pairs, of which the bound is
    what this token reduction saves of the operations. KV bytes are those of all keys and values.
    """
    from umim_core.throughput.roofline import ForwardCost

    merge, raw_tail = umim.checkpoint.config.recommended()
    tail = f", raw tail {raw_tail}" if raw_tail else ""
    kind = str(umim.backbone.dtype).removeprefix("torch.")
    say(f"frozen {umim.backbone.name}, {kind}; merge {merge}{tail}\n")
    reading = _reading(umim)
    chat = umim.backbone.require_tokenizer().chat_template is not None

    def said(text: str) -> PromptInput:
        return [{"role": "user", "content": text}] if chat else text

    def timed(how: Merge) -> tuple[float, Prefix]:
        began = time.perf_counter()
        prefix = umim.prefix(said(reading.text), merge=how, tools=reading.tools)
        return time.perf_counter() - began, prefix

    ways: tuple[Merge, Merge] = ("none", merge)
    for how in ways:  # the first forward of a process is slower
        umim.prefix(said(reading.text[:400]), merge=how)
    rounds = [(timed("none"), timed(merge)) for _ in range(pairs)]
    seconds = [(base[0], ours[0]) for base, ours in rounds]
    ratios = [base / ours for base, ours in seconds]
    prefixes = [side[1] for side in rounds[-1]]
    if say is write:
        _show_start(umim, prefixes[1])
    behind = [f"{reading.asking}{question}" for question, _ in reading.questions]
    prompts: PromptInput = [f"{request}\n" for request in behind]
    if chat:
        prompts = [[{"role": "user", "content": reading.text + request}] for request in behind]
    base, ours = (
        umim.generate(
            prompts,
            tools=reading.tools,
            past=prefix,
            merge=how,
            max_new_tokens=reading.new_tokens,
            do_sample=False,
        )
        for prefix, how in zip(prefixes, ways, strict=True)
    )
    tokens, units = len(prefixes[0].raw_ids[0]), prefixes[1].cache_length
    cost = ForwardCost.of(umim.merged_model)
    read = {
        "tokens": tokens,
        "token_reduction": prefixes[1].token_reduction,
        "base_seconds": statistics.median(base for base, _ in seconds),
        "umim_seconds": statistics.median(ours for _, ours in seconds),
        "speedup": statistics.median(ratios),
        "speedup_low": min(ratios),
        "speedup_high": max(ratios),
        "bound": cost.prefill_bound(tokens, units),
        "base_kv_bytes": cost.kv_bytes(tokens),
        "umim_kv_bytes": cost.kv_bytes(cost.columns(tokens, units)),
        "base_first_tokens": base.timings.first_token,
        "umim_first_tokens": ours.timings.first_token,
    }
    say(_reading_lines(reading.name, read, pairs))
    answers = []
    for (question, words), *sides in zip(reading.questions, base.text, ours.text, strict=True):
        left, right = (" ".join(text.split()) for text in sides)
        found = verdict(left, right, words)
        answers.append({"question": question, "base": left, "umim": right, "verdict": found})
        say(f"\n{len(answers)}. {question}   [{found}]\n   base  {left}\n   UMIM  {right}")
    say("")
    setting = {"backbone": umim.backbone.name, "dtype": kind, "merge": merge, "raw_tail": raw_tail}
    return {**setting, "reading": read, "answers": answers}


def _reading(umim: UMIM) -> _Reading:
    """Return tools for a checkpoint that merges them and a model that calls them, or a document."""
    from umim_core.serving.tool_calls import call_marks

    roles = umim.checkpoint.config.roles
    if "tools" in roles and call_marks(umim.backbone.require_tokenizer()) is not None:
        return _Reading("tools", _TODAY, json.loads(_TOOLS.read_bytes()), " ", _REQUESTS, 64)
    asking = "\n\nAnswer in one short sentence: "
    return _Reading("document", _document(umim), None, asking, _QUESTIONS, 24)


def _document(umim: UMIM) -> str:
    """Return the document, or its leading paragraphs that a backbone has positions for."""
    text, most = _DOCUMENT.read_text(encoding="utf-8").strip(), umim.backbone.max_positions
    while most is not None and "\n\n" in text and len(umim.backbone.encode(text)) > most - _ROOM:
        text = text.rpartition("\n\n")[0]
    return text


def _show_start(umim: UMIM, prefix: Prefix) -> None:
    """Print the beginning with merged spans in colour."""
    from umim_core.model.showing import View, merged_pieces

    ids, spans = prefix.raw_ids[0], [span for span in prefix.spans if span[0] < _SHOWN]
    at = min(max([_SHOWN, *map(sum, spans)]), len(ids))  # a span is (start, length)
    pieces = merged_pieces(ids[:at], spans, umim.backbone.decode)
    summary = f"... the first {at} of {len(ids):,} tokens; marked spans are one unit each"
    View(pieces, summary, "umim-demo").show()


def _reading_lines(name: str, read: dict[str, float], pairs: int) -> str:
    tokens, reduction = read["tokens"], read["token_reduction"]
    base, ours = read["base_kv_bytes"] / _MIB, read["umim_kv_bytes"] / _MIB
    whole = f"{read['base_seconds']:>10.2f} s{read['umim_seconds']:>10.2f} s"
    first = f"{read['base_first_tokens']:>10.2f} s{read['umim_first_tokens']:>10.2f} s"
    return (
        f"\n{'':<22}{'base':>12}{'UMIM':>12}\n"
        f"{f'to read the {name}':<22}{whole}\n"
        f"first tokens after it {first}\n"
        f"units                 {tokens:>12,}{tokens - round(reduction * tokens):>12,}\n"
        f"its KV cache          {base:>8.1f} MiB{ours:>8.1f} MiB\n"
        f"{read['speedup']:.2f} times as fast ({read['speedup_low']:.2f} to "
        f"{read['speedup_high']:.2f} in {pairs} pairs; {reduction:.0%} fewer units are "
        f"{read['bound']:.2f} times fewer operations)"
    )


def verdict(base: str, ours: str, words: str) -> str:
    """Compare two answers: by their text, and by the words that a right answer holds."""
    if base == ours:
        return "the same answer"
    left, right = (all(w in side.lower() for w in words.split()) for side in (base, ours))
    if left and right:
        return "other words, both right"
    wrong = "UMIM is" if left else "the base model is" if right else "both are"
    return f"DIFFERENT: {wrong} wrong"
