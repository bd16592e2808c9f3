"""Output of ``UMIM.generate``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

from umim_core.backbone.backbone import Backbone
from umim_core.config.form import Merge
from umim_core.inference.outputs import Generation, Row, TopTokens
from umim_core.model.showing import Shown, View, merged_pieces
from umim_core.progress import numbered

T = TypeVar("T")


class Column(Generic[T]):
    """One entry per row, read from the rows."""

    def __init__(self, entry: Callable[[Row], T]) -> None:
        self._entry = entry

    def __get__(self, output: GenerationOutput | None, owner: object) -> tuple[T, ...]:
        return () if output is None else tuple(self._entry(row) for row in output.rows)


@dataclass(frozen=True)
class GenerationOutput(Generation, Shown):
    """Generated texts, one entry per row in every tuple; the samples of a prompt stand together.

    Attributes:
        rows: The rows, of which the tuples below are columns; see ``Row``.
        timings: Seconds to the first token and for the others.
        state: To continue with another turn: ``generate(..., past=output.state)``.
        options: What was asked for, with what the checkpoint recommends and the model's settings.
        backbone: The model, which decodes the ids.
        unmerged: Per prompt why more of a chat stayed raw than its template and its replies; "".
    """

    backbone: Backbone = field(compare=False, repr=False)
    unmerged: tuple[str, ...] = field(default=(), compare=False)

    ids = Column(lambda row: row.ids)
    prompt_ids = Column(lambda row: row.prompt_ids)
    prompt_spans = Column(lambda row: row.prompt_spans)
    generated_spans = Column(lambda row: row.generated_spans)
    cache_lengths = Column(lambda row: tuple(row.cache_lengths))
    token_reduction = Column(lambda row: row.token_reduction)
    gen_kv_reduction = Column(lambda row: row.gen_kv_reduction)
    cumulative_kv_reduction = Column(lambda row: row.cumulative_kv_reduction)
    stop_reasons = Column(lambda row: row.stop_reason)

    @cached_property
    def text(self) -> tuple[str, ...]:
        """Generated text without special tokens; "" where the backbone has no tokenizer."""
        wordless = self.backbone.tokenizer is None
        return tuple("" if wordless else self.backbone.decode(list(row.ids)) for row in self.rows)

    @property
    def logprobs(self) -> tuple[tuple[float, ...], ...] | None:
        """The model's log-probability of each generated id; None unless asked for."""
        scored = (tuple(row.logprobs) for row in self.rows if row.logprobs is not None)
        return tuple(scored) or None

    @property
    def top_logprobs(self) -> tuple[tuple[TopTokens, ...], ...] | None:
        """The most probable (id, log-probability) per step; None unless asked for."""
        scored = (tuple(row.top_logprobs) for row in self.rows if row.top_logprobs is not None)
        return tuple(scored) or None

    @property
    def merge(self) -> Merge:
        """What was merged: what the caller said, else what the checkpoint recommends."""
        return self.options.merge or "all"

    @property
    def raw_tail(self) -> int:
        """Last tokens of each prompt that stayed raw, likewise."""
        return self.options.raw_tail or 0

    @property
    def views(self) -> tuple[View, ...]:
        return tuple(self._view(row) for row in self.rows)

    def _view(self, row: Row) -> View:
        border, total = row.prompt_length, row.prompt_length + row.generated
        generated = ((start + border, length) for start, length in row.generated_spans)
        spans, ids = [*row.prompt_spans, *generated], [*row.prompt_ids, *row.ids]
        pieces = merged_pieces(ids, spans, self.backbone.decode, border)
        saved = round(row.gen_kv_reduction * max(0, row.generated - 1))
        summary = (
            f"{numbered(border, 'prompt token')} -> {numbered(row.prompt_units, 'unit')}, "
            f"token reduction {row.token_reduction:.1%}; "
            f"{numbered(row.generated, 'generated token')}, {saved} of their "
            f"cache entries saved, cumulative KV TR {row.cumulative_kv_reduction:.1%}; first "
            f"token after {1000 * self.timings.first_token:,.0f} ms"
        )
        if (self.merge, self.raw_tail) != ("all", 0):
            tail = f", raw tail {self.raw_tail}" if self.raw_tail else ""
            summary += f"; merge {self.merge}{tail}"
        if (age := self.options.span_eviction) is not None:
            summary += f", span eviction {age}: {row.dropped} of {total - 1} columns dropped"
        return View(pieces, summary, "umim-generation")
