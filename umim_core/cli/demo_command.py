"""``umim demo``: one document and three questions, base model and UMIM next to each other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from umim_core.cli import shared_options as shared
from umim_core.cli.console_output import JsonFlag, emit, write

if TYPE_CHECKING:
    from umim_core.config.form import Merge
    from umim_core.inference.outputs import Prefix
    from umim_core.model.generation_output import GenerationOutput
    from umim_core.model.inputs import PromptInput
    from umim_core.model.umim import UMIM

_DOCUMENT: Final = Path(__file__).with_name("demo_document.txt")
_QUESTIONS: Final = (  # and a word that a right answer holds
    ("In which month is the workshop closed?", "august"),
    ("What is the most common picture on the lanterns?", "owl"),
    ("Which village is lit by paper lanterns?", "oakhollow"),
)
_NEW_TOKENS: Final = 24
_ROOM: Final = 128  # positions for a question, its answer and a template
_SHOWN: Final = 110  # tokens of the document that are shown with their spans
_MIB: Final = 2**20
_SIDES: Final = ("base", "UMIM")


def demo(
    checkpoint: shared.CheckpointOption = None,
    pairs: Annotated[int, typer.Option(min=1, help="Readings of the document by each side.")] = 3,
    budget: shared.BudgetOption = None,
    target_tr: shared.TargetOption = None,
    dtype: shared.DtypeOption = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Ask three questions on one document, of the base model and of UMIM, in a minute.

    Nothing is trained, and every figure is measured now, on this machine's CPU, whatever else runs
    there; umim bench waits for a quiet moment.
    """
    from umim_core.checkpoint.checkpoint_files import default_checkpoint

    began = time.monotonic()
    name = checkpoint or default_checkpoint()
    say: Callable[[str], None] = (lambda line: None) if as_json else write
    say(f"loading {name}")
    umim = shared.load_umim(name, dtype, "cpu", budget, target_tr)
    merge, raw_tail = umim.checkpoint.config.recommended()
    tail = f", raw tail {raw_tail}" if raw_tail else ""
    kind = str(umim.backbone.dtype).removeprefix("torch.")
    say(f"{name} on the frozen {umim.backbone.name}, {kind}; merge {merge}{tail}\n")
    document = _document(umim)
    read, prefixes = _read(umim, document, merge, pairs)
    if not as_json:
        _show_start(umim, prefixes[1])
    say(_reading_lines(read, pairs))
    answers = []
    for number, (question, key) in enumerate(_QUESTIONS, start=1):
        answers.append(_answer(umim, document, question, key, prefixes, merge))
        say(_answer_lines(number, answers[-1]))
    seconds = time.monotonic() - began
    report: dict[str, object] = {
        "checkpoint": name,
        "backbone": umim.backbone.name,
        "dtype": kind,
        "merge": merge,
        "raw_tail": raw_tail,
        "reading": read,
        "answers": answers,
        "seconds": seconds,
    }
    closing = (
        "It pays where prompts are long, or a document is kept for many questions; where answers "
        "must be\nthose of the base model, use merge='none'. From which length on: umim bench."
    )
    emit(report, [closing, f"{seconds:.0f} s"], as_json)


def _document(umim: UMIM) -> str:
    """Return the document, or its leading paragraphs that a backbone has positions for."""
    text, most = _DOCUMENT.read_text(encoding="utf-8").strip(), umim.backbone.max_positions
    paragraphs = text.split("\n\n")
    while most is not None and len(paragraphs) > 1:
        if len(umim.backbone.encode("\n\n".join(paragraphs))) <= most - _ROOM:
            break
        paragraphs.pop()
    return "\n\n".join(paragraphs)


def _prompt(umim: UMIM, text: str) -> PromptInput:
    """Return a text as a user's message where the backbone has a chat template."""
    if umim.backbone.require_tokenizer().chat_template is None:
        return text
    return [{"role": "user", "content": text}]


def _read(
    umim: UMIM, document: str, merge: Merge, pairs: int
) -> tuple[dict[str, float], tuple[Prefix, Prefix]]:
    """Read the document by both sides in turn; return the figures and the last prefixes.

    Times are medians; the speed-up is the median ratio of alternating pairs, of which the bound is
    the most that this token reduction can give. KV bytes are those of all keys and values.
    """
    from umim_core.throughput.roofline import ForwardCost

    prompt, short = _prompt(umim, document), _prompt(umim, document.partition("\n\n")[0])

    def timed(how: Merge) -> tuple[float, Prefix]:
        began = time.perf_counter()
        prefix = umim.prefix(prompt, merge=how)
        return time.perf_counter() - began, prefix

    umim.prefix(short, merge="none")  # the first forward of a process is slower
    umim.prefix(short, merge=merge)
    rounds = [(timed("none"), timed(merge)) for _ in range(pairs)]
    seconds = [(base[0], ours[0]) for base, ours in rounds]
    ratios = [base / ours for base, ours in seconds]
    first, second = (side[1] for side in rounds[-1])
    tokens, units = len(first.raw_ids), second.cache_length
    cost = ForwardCost.of(umim.merged_model)
    figures = {
        "tokens": tokens,
        "token_reduction": second.token_reduction,
        "base_seconds": statistics.median(base for base, _ in seconds),
        "umim_seconds": statistics.median(ours for _, ours in seconds),
        "speedup": statistics.median(ratios),
        "speedup_low": min(ratios),
        "speedup_high": max(ratios),
        "bound": cost.prefill_bound(tokens, units),
        "base_kv_bytes": cost.kv_bytes(tokens),
        "umim_kv_bytes": cost.kv_bytes(cost.columns(tokens, units)),
    }
    return figures, (first, second)


def _show_start(umim: UMIM, prefix: Prefix) -> None:
    """Print the beginning of the document with merged spans in colour."""
    from umim_core.model.showing import View, merged_pieces

    spans = [span for span in prefix.spans if span[0] < _SHOWN]
    at = min(max([_SHOWN, *map(sum, spans)]), len(prefix.raw_ids))  # a span is (start, length)
    pieces = merged_pieces(prefix.raw_ids[:at], spans, umim.backbone.decode)
    summary = (
        f"... the first {at} of {len(prefix.raw_ids):,} tokens; marked spans are one unit each"
    )
    View(pieces, summary, "umim-demo").show()


def _reading_lines(read: dict[str, float], pairs: int) -> str:
    tokens, reduction = read["tokens"], read["token_reduction"]
    base, ours = read["base_kv_bytes"] / _MIB, read["umim_kv_bytes"] / _MIB
    seconds = (f"{read[f'{side}_seconds']:.2f} s" for side in ("base", "umim"))
    cells = (
        ("", *_SIDES),
        ("to read the document", *seconds),
        ("units", f"{tokens:,}", f"{tokens - round(reduction * tokens):,}"),
        ("its KV cache", f"{base:.1f} MiB", f"{ours:.1f} MiB"),
    )
    table = [f"{label:<22}{left:>12}{right:>12}" for label, left, right in cells]
    speed = (
        f"{read['speedup']:.2f} times as fast ({read['speedup_low']:.2f} to "
        f"{read['speedup_high']:.2f} in {pairs} pairs; {read['bound']:.2f} is the most that "
        f"{reduction:.0%} fewer units can give)"
    )
    return "\n".join(["", *table, speed])


def _answer(
    umim: UMIM, document: str, question: str, key: str, prefixes: Sequence[Prefix], merge: Merge
) -> dict[str, Any]:
    """Answer a question behind the document that each side has read."""
    chat = umim.backbone.require_tokenizer().chat_template is not None
    request = f"\n\nAnswer in one short sentence: {question}"
    prompt: PromptInput = _prompt(umim, document + request) if chat else f"{request}\n"
    sides: list[GenerationOutput] = []
    for prefix, how in zip(prefixes, ("none", merge), strict=True):
        side = umim.generate(
            prompt, past=prefix, max_new_tokens=_NEW_TOKENS, do_sample=False, merge=how
        )
        sides.append(side)
    base, ours = (" ".join(side.text[0].split()) for side in sides)
    times = [side.timings.first_token for side in sides]
    return {
        "question": question,
        "base": base,
        "umim": ours,
        "verdict": verdict(base, ours, key),
        "base_first_token": times[0],
        "umim_first_token": times[1],
    }


def verdict(base: str, ours: str, key: str) -> str:
    """Compare two answers: by their text, and by a word that a right answer holds."""
    if base == ours:
        return "the same answer"
    verdicts = {
        (True, True): "other words, both right",
        (True, False): "DIFFERENT: UMIM is wrong",
        (False, True): "DIFFERENT: the base model is wrong",
        (False, False): "DIFFERENT: both are wrong",
    }
    return verdicts[key in base.lower(), key in ours.lower()]


def _answer_lines(number: int, answer: dict[str, Any]) -> str:
    sides = zip(_SIDES, ("base", "umim"), strict=True)
    rows = [
        f"   {side}  first token after {1e3 * seconds:,.0f} ms  {answer[name]}"
        for side, name in sides
        for seconds in [answer[f"{name}_first_token"]]
    ]
    return "\n".join([f"\n{number}. {answer['question']}   [{answer['verdict']}]", *rows])
