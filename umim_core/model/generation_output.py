"""Output of ``UMIM.generate``."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console
from torch import Tensor
from transformers import TextStreamer

from umim_core.backbone.backbone import Backbone
from umim_core.config.form import Merge
from umim_core.inference.outputs import EngineOutput, GenerationState, Spans, Timings, TopTokens
from umim_core.inference.stopping import StopReason
from umim_core.model.showing import Decode, Piece, View, unit_texts


@dataclass(frozen=True)
class GenerationOutput:
    """Generated texts, one entry per row in every tuple; the samples of a prompt stand together.

    Attributes:
        text: Generated text, decoded from the raw ids, without special tokens; "" where the
            backbone has no tokenizer.
        ids: Generated raw ids, an end-of-sequence id included.
        prompt_ids: Raw ids that were prefilled.
        prompt_spans: Merged spans of the prompt as (start, length) in raw prompt tokens.
        generated_spans: The same among the generated tokens; with border matching a start may be
            negative, in the prompt.
        cache_lengths: Units in the cache after the prefill and after each fed token.
        token_reduction: (raw tokens - units) / raw tokens of the prompt.
        gen_kv_reduction: Share of the generated tokens' cache entries saved at the end; above 1
            where entries of the prompt went, too (``match_border``, ``span_eviction``).
        cumulative_kv_reduction: The same, summed over all steps.
        stop_reasons: ``eos``, ``stop_string``, ``criteria`` or ``length``.
        logprobs: The model's log-probability of each generated id; None unless asked for.
        top_logprobs: The most probable (id, log-probability) per step; None unless asked for.
        timings: Seconds to the first token and for the others.
        state: To continue with another turn: ``generate(..., past=output.state)``.
        decode: The backbone's, to show the texts.
        merge: What was merged: what the caller said, else what the checkpoint recommends.
        raw_tail: Last tokens of each prompt that stayed raw, likewise.
        span_eviction: Age in tokens at which columns of spans left the cache; None without.
        dropped: How many left it, of all layers or of those below the merge depth; empty without.
    """

    text: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    prompt_ids: tuple[tuple[int, ...], ...]
    prompt_spans: tuple[Spans, ...]
    generated_spans: tuple[Spans, ...]
    cache_lengths: tuple[tuple[int, ...], ...]
    token_reduction: tuple[float, ...]
    gen_kv_reduction: tuple[float, ...]
    cumulative_kv_reduction: tuple[float, ...]
    stop_reasons: tuple[StopReason, ...]
    logprobs: tuple[tuple[float, ...], ...] | None
    top_logprobs: tuple[tuple[TopTokens, ...], ...] | None
    timings: Timings = field(compare=False)
    state: GenerationState = field(compare=False, repr=False)
    decode: Decode = field(compare=False, repr=False)
    merge: Merge = field(default="all", compare=False)
    raw_tail: int = field(default=0, compare=False)
    span_eviction: int | None = field(default=None, compare=False)
    dropped: tuple[int, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, output: EngineOutput, backbone: Backbone) -> GenerationOutput:
        """Decode what the engine returned."""
        rows, wordless = output.rows, backbone.tokenizer is None
        scored = rows[0].logprobs is not None
        return cls(
            text=tuple("" if wordless else backbone.decode(list(row.ids)) for row in rows),
            ids=tuple(row.ids for row in rows),
            prompt_ids=tuple(row.prompt_ids for row in rows),
            prompt_spans=tuple(row.prompt_spans for row in rows),
            generated_spans=tuple(row.generated_spans for row in rows),
            cache_lengths=tuple(row.cache_lengths for row in rows),
            token_reduction=tuple(row.token_reduction for row in rows),
            gen_kv_reduction=tuple(row.gen_kv_reduction for row in rows),
            cumulative_kv_reduction=tuple(row.cumulative_kv_reduction for row in rows),
            stop_reasons=tuple(row.stop_reason for row in rows),
            logprobs=tuple(row.logprobs or () for row in rows) if scored else None,
            top_logprobs=tuple(row.top_logprobs or () for row in rows) if scored else None,
            timings=output.timings,
            state=output.state,
            decode=backbone.decode,
            merge=output.merge,
            raw_tail=output.raw_tail,
            span_eviction=output.span_eviction,
            dropped=output.dropped,
        )

    @property
    def views(self) -> tuple[View, ...]:
        """Prompt and text of every row, to be shown."""
        return tuple(self._view(row) for row in range(len(self.ids)))

    def _view(self, row: int) -> View:
        prompt_ids, ids = self.prompt_ids[row], self.ids[row]
        border = len(prompt_ids)
        spans = dict(self.prompt_spans[row])
        spans |= {start + border: length for start, length in self.generated_spans[row]}
        parts: list[tuple[int, int, int, bool]] = []  # tokens, of the unit, unit, in the prompt
        start = unit = 0
        while start < border + len(ids):
            length = spans.get(start, 1)
            inside = border - start  # tokens of the unit in the prompt
            cut = (inside, length - inside) if 0 < inside < length else (length,)
            parts += [(n, length, unit, inside > 0 and not i) for i, n in enumerate(cut)]
            start, unit = start + length, unit + 1
        texts = unit_texts([*prompt_ids, *ids], [tokens for tokens, *_ in parts], self.decode)
        pieces = [Piece(text, *part[1:]) for text, part in zip(texts, parts, strict=True)]
        units = border - round(self.token_reduction[row] * border)
        saved = round(self.gen_kv_reduction[row] * max(0, len(ids) - 1))
        summary = (
            f"{border} prompt tokens -> {units} units, token reduction "
            f"{self.token_reduction[row]:.1%}; {len(ids)} generated tokens, {saved} of their "
            f"cache entries saved, cumulative KV TR {self.cumulative_kv_reduction[row]:.1%}; first "
            f"token after {1000 * self.timings.first_token:,.0f} ms"
        )
        if (self.merge, self.raw_tail) != ("all", 0):
            tail = f", raw tail {self.raw_tail}" if self.raw_tail else ""
            summary += f"; merge {self.merge}{tail}"
        if self.span_eviction is not None:
            read = border + max(0, len(ids) - 1)
            of_all = f"{self.dropped[row]} of {read} columns dropped"
            summary += f", span eviction {self.span_eviction}: {of_all}"
        return View(tuple(pieces), summary, "umim-generation")

    def show(self, console: Console | None = None) -> None:
        """Print every prompt and text with merged spans coloured, and a line of figures."""
        for view in self.views:
            view.show(console)

    def html(self) -> str:
        """Return a self-contained HTML fragment of all rows; see ``showing.View.html``."""
        return "".join(view.html() for view in self.views)

    def _repr_html_(self) -> str:
        """Show it in a notebook."""
        return self.html()


class TextPieces(TextStreamer):
    """Collect text as transformers' streamer finds it complete: whole words and lines."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(
            backbone.require_tokenizer(),
            skip_prompt=True,
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        self._pieces: list[str] = []

    def put(self, value: Tensor) -> None:
        """Take the prompt or the next id.

        A line that is complete leaves its last token: decoded alone, what follows would lose its
        space. One without text, a special token say, cannot stand for the line.
        """
        line = self.token_cache
        super().put(value)  # type: ignore[no-untyped-call]  # transformers' own
        if line and not self.token_cache:
            self.token_cache = line[-1:] if self._text(line[-1:]) else line
            self.print_len = len(self._text(self.token_cache))

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, **self.decode_kwargs))

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Keep a piece of text."""
        if text:
            self._pieces.append(text)

    def drain(self) -> list[str]:
        """Return the pieces since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces
