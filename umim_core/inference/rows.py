"""Rows in progress: their generated tokens, cut into units token by token, and their record.

The rules see generated tokens only, unless the border to the prompt is opened; the token that ends
a row is never fed. What merges is decided by ``incremental_matcher``; here it is noted::

    rule (p2, g1)   prompt p1 p2, border open, then g1 g2 are fed

    column    0   1   2    3   4          _REACH = 3 columns in front for the prompt's last units
    before    -   p1  p2                  lowest 3, count 3
    g1 fed    -   p1  p2g1                p2 is taken back: lowest 2; the span starts at -1
    g2 fed    -   p1  p2g1 g2
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
from umim_core.inference.prompts import Prompts, TokenPrompt, open_end
from umim_core.inference.sampling import TokenChooser, log_probs
from umim_core.inference.stopping import Stopper, StopReason
from umim_core.merging.packing import Segmentation
from umim_core.rules.incremental_matcher import Advance, SuffixMatcher
from umim_core.rules.matcher import Matcher
from umim_core.rules.trie import LONGEST, Ints

_FIRST_CAPACITY: Final = 64
_REACH: Final = LONGEST - 1  # units of the prompt that a rule may take back
_NO_RULES: Final = np.zeros(1, dtype=np.uint64)


class GeneratedUnits:
    """The units of B rows of generated tokens, empty at first; all raw without a matcher."""

    def __init__(self, matcher: Matcher | None, rows: int) -> None:
        self._suffixes = (
            SuffixMatcher(_NO_RULES, rows) if matcher is None else matcher.suffixes(rows)
        )
        self._rows = np.arange(rows)
        self._fed = np.zeros(rows, dtype=np.int64)
        self._width = _REACH
        # The last units of the prompt stand in front, of length 0 where rules must not reach them.
        self._counts = np.full(rows, _REACH, dtype=np.int64)
        self._lowest = self._counts.copy()
        self._lengths = np.zeros((rows, _FIRST_CAPACITY), dtype=np.int8)

    def open_border(self, prompts: Sequence[tuple[Ints, Segmentation]]) -> None:
        """Let rules reach back into ends of prompts, as ids [T_b] and units; before ``push``."""
        for row, (ids, (starts, lengths)) in enumerate(prompts):
            self._suffixes.resume(row, ids, starts)
            last = lengths[-_REACH:]
            self._lengths[row, _REACH - len(last) : _REACH] = last

    def push(self, tokens: Ints, running: NDArray[np.bool_]) -> Advance:
        """Add the ids just chosen [B] that will be fed to the model, those of ``running`` rows [B].

        Returns:
            How many units each row rolls back and which span it is fed.
        """
        step = self._suffixes.advance(tokens, running)
        if self._width == self._lengths.shape[1]:
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)], axis=1)
        self._width += 1
        self._counts -= step.rollback
        np.minimum(self._lowest, self._counts, out=self._lowest)
        self._lengths[self._rows, self._counts] = step.lengths  # 0 behind the end of an ended row
        self._counts += running
        self._fed += running
        return step

    def spans(self, row: int) -> tuple[tuple[int, int], ...]:
        """Return a row's merged units as (start, length) in generated tokens, in order.

        With an open border the first may start at -1 to -3, in the prompt.
        """
        lengths = self._lengths[row, self._lowest[row] : self._counts[row]].astype(np.int64)
        starts = np.cumsum(lengths) - lengths + (self._fed[row] - lengths.sum())
        merged = lengths > 1
        return tuple(zip(starts[merged].tolist(), lengths[merged].tolist(), strict=True))

    def taken_from_prompt(self, row: int) -> int:
        """Return how many units of its prompt a row took back."""
        return _REACH - int(self._lowest[row])


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
        whole = len(starts) - units.taken_from_prompt(row)
        spans = zip(starts[:whole].tolist(), lengths[:whole].tolist(), strict=True)
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


def open_ends(
    prompts: Sequence[TokenPrompt], rows: Sequence[Row]
) -> list[tuple[Ints, Segmentation]]:
    """Return what each row's generated tokens may merge with; see ``open_end``."""
    samples = len(rows) // len(prompts)
    return [
        open_end(prompts[b // samples], np.array(row.prompt_ids), row.cut)
        for b, row in enumerate(rows)
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
