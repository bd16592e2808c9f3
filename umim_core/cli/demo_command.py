"""``umim demo``: compression, generation, speed and perplexity of a checkpoint in a minute."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from umim_core.cli.console_output import JsonFlag, emit, write
from umim_core.cli.prompt_input import CheckpointOption
from umim_core.config.benchmark import BenchmarkConfig

if TYPE_CHECKING:
    from umim_core.benchmarking.break_even import ThroughputRow
    from umim_core.model.generation_output import GenerationOutput
    from umim_core.model.umim import UMIM

_PARAGRAPH: Final = (
    "Language models read text one token at a time, although in the course of a day we use the "
    "same words again and again. At the end of the day there is no need to think about each of "
    "them, and it may be a good idea to read a number of them at once. For example, the United "
    "States of America, with respect to the rest of the world, and as well as many other things, "
    "are one idea for most of us."
)
_MESSAGE: Final = (
    "What is the capital of France, and what is it known for? Answer in two sentences."
)
_PROMPT: Final = "Return the sum of the array elements over a given"
_NEW_TOKENS: Final = 48
_TIMING: Final = BenchmarkConfig(
    prompt_lengths=(1024,),  # fewer where the backbone has fewer positions
    new_tokens=2,
    warmup=1,
    pairs=3,
    batch_sizes=(1,),
    token_reductions=(),
)
_WINDOW: Final = 512  # tokens of a window of held-out text
_WINDOWS: Final = 2
_CHARACTERS: Final = 16  # of a text that surely make a token
_HEADINGS: Final = ("text", "tokens", "TR %", "PPL base", "PPL UMIM")


@dataclass(frozen=True)
class TextScore:
    """Perplexity of one text.

    Attributes:
        text: What it is.
        tokens: Raw tokens.
        token_reduction: Share of them that merging removes.
        ppl_base: Perplexity of the base model per raw token.
        ppl_umim: The same with merged spans.
    """

    text: str
    tokens: int
    token_reduction: float
    ppl_base: float
    ppl_umim: float

    def cells(self) -> tuple[str, ...]:
        """Return what a table shows."""
        shares = f"{100 * self.token_reduction:.1f}"
        perplexities = f"{self.ppl_base:.2f}", f"{self.ppl_umim:.2f}"
        return self.text, str(self.tokens), shares, *perplexities


def demo(checkpoint: CheckpointOption = None, as_json: JsonFlag = False) -> None:
    """Show in a minute what a checkpoint does: compress, generate, time a prefill, perplexity.

    Nothing is trained, and every figure is measured now, on this machine's CPU.
    """
    from umim_core import UMIM
    from umim_core.checkpoint.default_checkpoint import default_checkpoint

    began = time.monotonic()
    name = checkpoint or default_checkpoint()
    _say(as_json, f"loading {name}")
    umim = UMIM.from_pretrained(name)
    _say(as_json, f"checkpoint {name}, backbone {umim.backbone.name}, frozen")
    _say(as_json, "\n1. A paragraph, merged spans marked: each is one input embedding")
    cut = umim.compress(_PARAGRAPH)
    if not as_json:
        cut.show()
    _say(as_json, "\n2. A generated text, merged spans marked")
    text = _generated(umim)
    if not as_json:
        text.show()
    timing = _timing(umim.backbone.max_positions)
    length = timing.prompt_lengths[0]
    _say(
        as_json, f"\n3. Prefill of {length:,} tokens of held-out docstrings, until the first token"
    )
    prefill = _prefill(umim, timing)
    _say(as_json, _speed(prefill))
    _say(as_json, "\n4. Perplexity per raw token, of the base model and with merged spans")
    scores = _scores(umim)
    seconds = time.monotonic() - began
    document: dict[str, object] = {
        "checkpoint": name,
        "backbone": umim.backbone.name,
        "token_reduction": cut.token_reduction,
        "text": text.text[0],
        "prefill": asdict(prefill),
        "scores": [asdict(score) for score in scores],
        "seconds": seconds,
    }
    note = "TR: share of tokens removed by merging. PPL: perplexity, lower is better."
    emit(document, [*_table(scores), note, f"\n{seconds:.0f} s"], as_json)


def _say(as_json: bool, line: str) -> None:
    if not as_json:
        write(line)
        sys.stdout.flush()


def _generated(umim: UMIM) -> GenerationOutput:
    """Return an answer of a chat model, or a text that goes on, merged as recommended."""
    if umim.backbone.require_tokenizer().chat_template is not None:
        chat = [{"role": "user", "content": _MESSAGE}]
        return umim.generate(chat, max_new_tokens=_NEW_TOKENS, do_sample=False)
    return umim.generate(
        _PROMPT, max_new_tokens=_NEW_TOKENS, do_sample=False, repetition_penalty=1.3
    )


def _timing(positions: int | None) -> BenchmarkConfig:
    """Return a protocol whose prompt and new tokens fit a backbone's positions."""
    if positions is None:
        return _TIMING
    fits = positions - _TIMING.new_tokens + 1  # the last token is never fed
    return _TIMING.model_copy(update={"prompt_lengths": (min(fits, *_TIMING.prompt_lengths),)})


def _prefill(umim: UMIM, timing: BenchmarkConfig) -> ThroughputRow:
    """Time base and UMIM on the same prompts, in turn."""
    import numpy as np

    from umim_core.benchmarking.throughput import measure_throughput, tokens_needed
    from umim_core.store.machine_lock import measuring

    needed = tokens_needed(timing) + timing.pairs * timing.new_tokens
    ids = np.array(_held_out(umim, needed), dtype=np.int64)
    with measuring():
        rows = measure_throughput(umim.compressed, ids, timing)
    return next(row for row in rows if row.phase == "prefill")


def _held_out(umim: UMIM, tokens: int) -> list[int]:
    """Return the first ids of docstrings that no checkpoint of ours was trained on."""
    from umim_core.embedded.docstring_corpus import held_out_text

    return umim.backbone.encode(held_out_text()[: _CHARACTERS * tokens])[:tokens]


def _speed(row: ThroughputRow) -> str:
    return (
        f"base {1e3 * row.base_seconds:,.0f} ms, UMIM {1e3 * row.umim_seconds:,.0f} ms with "
        f"{row.token_reduction:.1%} of the tokens removed: {row.speedup:.2f} times as fast\n"
        f"(median of {row.pairs} pairs; matching and merging are part of UMIM's time)"
    )


def _scores(umim: UMIM) -> list[TextScore]:
    """Score windows of held-out docstrings, and the paragraph."""
    import numpy as np

    from umim_core.evaluation.perplexity import perplexity

    ids = np.array(_held_out(umim, _WINDOW * _WINDOWS), dtype=np.int64)
    texts = [
        (f"docstrings, window {number}", part)
        for number, part in enumerate(ids.reshape(_WINDOWS, -1), start=1)
    ]
    texts.append(("the paragraph", np.array(umim.backbone.encode(_PARAGRAPH), dtype=np.int64)))
    found = []
    for name, part in texts:
        base, ours = (
            perplexity([part], model) for model in (umim.compressed.base(), umim.compressed)
        )
        found.append(TextScore(name, len(part), ours.token_reduction, base.ppl, ours.ppl))
    return found


def _table(scores: list[TextScore]) -> list[str]:
    rows = [_HEADINGS, *(score.cells() for score in scores)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
