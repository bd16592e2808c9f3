"""Rows in progress: their generated tokens, cut into units token by token, and their record.

The rules see generated tokens only; the token that ends a row is never fed. What merges is decided
by ``incremental_matcher``; here it is noted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umim_core.inference.outputs import Forward, GenerationState, Observer, RowOutput, TopTokens
from umim_core.inference.prompts import Prompts
from umim_core.inference.sampling import TokenChooser, log_probs
from umim_core.inference.stopping import Stopper, StopReason
from umim_core.merging.packing import Segmentation
from umim_core.rules.matcher import Advance, Matcher, SuffixMatcher
from umim_core.text.token_ids import Ints

_FIRST_CAPACITY: Final = 64
_NO_RULES: Final = np.zeros(1, dtype=np.uint64)


class GeneratedUnits:
    """The units of B rows of generated tokens, empty at first; all raw without a matcher."""

    def __init__(self, matcher: Matcher | None, rows: int) -> None:
        self._suffixes = (
            SuffixMatcher(_NO_RULES, rows) if matcher is None else matcher.suffixes(rows)
        )
        self._rows = np.arange(rows)
        self._counts = np.zeros(rows, dtype=np.int64)
        self._lengths = np.zeros((rows, _FIRST_CAPACITY), dtype=np.int8)

    def push(self, tokens: Ints, running: NDArray[np.bool_]) -> Advance:
        """Add the ids just chosen [B] that will be fed to the model, those of ``running`` rows [B].

        Returns:
            How many units each row rolls back and which span it is fed.
        """
        step = self._suffixes.advance(tokens, running)
        self._counts -= step.rollback
        if int(self._counts.max()) == self._lengths.shape[1]:
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)], axis=1)
        self._lengths[self._rows, self._counts] = step.lengths  # 0 behind the end of an ended row
        self._counts += running
        return step

    def spans(self, row: int) -> tuple[tuple[int, int], ...]:
        """Return a row's merged units as (start, length) in generated tokens, in order."""
        lengths = self._lengths[row, : self._counts[row]].astype(np.int64)
        starts, merged = np.cumsum(lengths) - lengths, lengths > 1
        return tuple(zip(starts[merged].tolist(), lengths[merged].tolist(), strict=True))


@dataclass
class Row:
    """State of one row.

    Attributes:
        raw: All raw ids so far: an earlier turn's, the prompt's and the generated ones.
        past: How many an earlier turn left in the cache.
        prompt: How many were prefilled, as the units of ``cut``.
        cache_lengths: Units held after every forward.
        logprobs: Of the generated ids, where asked for.
        top_logprobs: Most probable ids of each step, where asked for.
        stop_reason: None while it runs.
    """

    raw: list[int]
    past: int
    prompt: int
    cut: Segmentation
    cache_lengths: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopTokens] = field(default_factory=list)
    stop_reason: StopReason | None = None

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Raw ids that were prefilled."""
        return tuple(self.raw[self.past : self.past + self.prompt])

    @property
    def ids(self) -> tuple[int, ...]:
        """Generated raw ids."""
        return tuple(self.raw[self.past + self.prompt :])

    def output(self, units: GeneratedUnits, row: int, scored: bool) -> RowOutput:
        """Hand the record over; ``row`` is this row's number in ``units``."""
        assert self.stop_reason is not None  # noqa: S101  a request ends when all rows have
        starts, lengths = self.cut
        spans = zip(starts.tolist(), lengths.tolist(), strict=True)
        return RowOutput(
            ids=self.ids,
            prompt_ids=self.prompt_ids,
            prompt_units=len(starts),
            prompt_spans=tuple((s, n) for s, n in spans if n > 1),
            generated_spans=units.spans(row),
            cache_lengths=tuple(self.cache_lengths),
            stop_reason=self.stop_reason,
            logprobs=tuple(self.logprobs) if scored else None,
            top_logprobs=tuple(self.top_logprobs) if scored else None,
        )


def new_rows(prompts: Prompts, past: GenerationState | None, samples: int) -> list[Row]:
    """Return the rows of a request, the samples of a prompt side by side."""
    before = ((),) * len(prompts.ids) if past is None else past.fed_ids
    return [
        Row([*fed, *ids.tolist()], len(fed), len(ids), cut)
        for fed, ids, cut in zip(before, prompts.ids, prompts.cuts, strict=True)
        for _ in range(samples)
    ]


def record_forward(
    rows: Sequence[Row], logits: Tensor, lengths: Tensor, observer: Observer | None
) -> None:
    """Note what running rows hold after a forward [B], and show it with its logits [B, V]."""
    for row, length in zip(rows, lengths.tolist(), strict=True):
        if row.stop_reason is None:
            row.cache_lengths.append(length)
    if observer is not None:
        running = torch.tensor([row.stop_reason is None for row in rows])
        observer(Forward(logits, lengths.clone(), tuple(row.ids for row in rows), running))


def choose_tokens(
    rows: Sequence[Row],
    logits: Tensor,
    chooser: TokenChooser,
    stopper: Stopper,
    logprobs: int | None,
) -> NDArray[np.int64]:
    """Give every running row its next token by logits [B, V], and end rows.

    Of the most probable ids ``logprobs`` are recorded; None records nothing.

    Returns:
        The choice of all rows [B]; that of ended rows means nothing.
    """
    running = [row.stop_reason is None for row in rows]
    tokens = chooser.choose(logits, [row.raw for row in rows], running)
    ids = np.array(tokens, dtype=np.int64)
    if logprobs is not None:
        _record(rows, ids, logits, logprobs)
    for number, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        if row.stop_reason is None:
            row.raw.append(token)
            generated = len(row.raw) - row.past - row.prompt
            row.stop_reason = stopper.reason(row.raw, generated, number)
    return ids


def _record(rows: Sequence[Row], tokens: Ints, logits: Tensor, top: int) -> None:
    scores, chosen = log_probs(logits, tokens)
    best = scores.topk(top, dim=-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    for row, value, (ids, values) in zip(rows, chosen, pairs, strict=True):
        if row.stop_reason is None:
            row.logprobs.append(value)
            row.top_logprobs.append(tuple(zip(ids, values, strict=True)))
