"""LLMLingua: passages of low perplexity go first, then tokens, segment after segment.

A worked example, with segments of 4 tokens, a budget of 5 of 8 and no blank lines::

    segment     a b c d             e f g h
    read after  nothing             a d                what was kept so far, not what was there
    keeps       2 of 4: a d         3 of 4: e f h      the most surprising tokens of the segment

This is the paper's form. ``llmlingua-published`` is that of its package, which chooses otherwise
(``form="published"``), and keeps about as many tokens as the budget.

Source: Jiang et al., "LLMLingua: Compressing Prompts for Accelerated Inference of Large Language
Models" (EMNLP 2023). Differences: docs/baselines-differences.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import DynamicCache

from umim_core.backbone.backbone import Backbone
from umim_core.baselines.lexical_units import passages, token_texts
from umim_core.baselines.methods import Text, TokenReducer, highest, read_behind
from umim_core.baselines.selective_context import self_information
from umim_core.merging.likelihood import check_rows, target_scores
from umim_core.text.token_ids import Ints


class CompressedPrefix:
    """The kept tokens before a segment, in a KV cache; segments are scored after them.

    Where prefix and segment exceed the model's positions, the last tokens of the prefix stay, half
    as many as there are positions.
    """

    def __init__(self, scorer: Backbone) -> None:
        self._scorer = scorer
        self._cached_ids = np.zeros(0, dtype=np.int64)  # what the cache holds
        self._cache = DynamicCache()
        self._last: Tensor | None = None  # hidden state after the prefix [1, d]

    @torch.no_grad()
    def score(self, segment: Ints) -> NDArray[np.float64]:
        """Return the self-information of a segment's tokens [S] after the prefix (nats).

        A segment has at most half as many tokens as the model has positions.
        """
        check_rows([segment], self._scorer.vocab_size)
        limit = self._scorer.max_positions
        if limit is not None and len(self._cached_ids) + len(segment) > limit:
            tail = self._cached_ids[-(limit // 2) :]
            self._cached_ids, self._cache = tail[:0], DynamicCache()
            self.append(tail)
        hidden = self._read(segment)
        if len(self._cached_ids):
            self._cache.crop(-len(segment))
        else:
            self._cache = DynamicCache()
        before = [] if self._last is None else [self._last]
        targets = torch.from_numpy(segment).to(hidden.device)
        states = torch.cat([*before, hidden[:-1]])
        unknown = len(segment) - len(states)  # 1 where nothing stands before the segment
        information = np.full(len(segment), math.log(self._scorer.vocab_size))
        if len(states):
            scores = target_scores(states, targets[unknown:], self._scorer)
            information[unknown:] = -scores.log_probs.cpu().double().numpy()
        return information

    @torch.no_grad()
    def append(self, ids: Ints) -> None:
        if len(ids):
            self._last = self._read(ids)[-1:]
            self._cached_ids = np.concatenate([self._cached_ids, ids])

    def _read(self, ids: Ints) -> Tensor:
        """Read ids [S] after the prefix: hidden states [S, d]; the cache grows by them."""
        scorer = self._scorer
        scorer.check_window(len(self._cached_ids) + len(ids))
        tokens = torch.from_numpy(ids).to(scorer.device)
        return read_behind(scorer, tokens, self._cache)[0]


def published_choice(
    ids: Ints,
    protected: NDArray[np.bool_],
    budget: int,
    segment: int,
    whole: NDArray[np.float64],
    prefix: CompressedPrefix,
) -> Ints:
    """Return the indices of the tokens [T] that stay, rising; about ``budget`` of them.

    ``whole`` has the loss of each token in the whole text [T]; ``prefix`` scores after kept tokens,
    none at first.
    """
    remaining, losses = np.arange(len(ids)), whole[1:].copy()
    share = budget / (len(ids) + 3)  # its count of a context's tokens, and one
    end = min(segment, len(ids))
    start = end - segment
    for number, size in enumerate(_sizes(len(ids), segment)):
        if end > len(remaining):
            break
        if number:
            losses[start : end - 1] = prefix.score(ids[remaining[start:end]])[1:]
            prefix.append(ids[remaining[start : end - segment]])
            start = end - segment
        stop = start + size
        keep = np.append(losses > _quantile(losses, share), True)
        keep[stop:] = True
        keep[:start] = True
        keep |= protected[remaining]
        end = stop - int((~keep[:stop]).sum()) + segment
        remaining, losses = remaining[keep], losses[keep[:-1]]
    return remaining


def _quantile(losses: NDArray[np.float64], share: float) -> float:
    """Return the loss that a share of all losses is above of, less one of them."""
    place = max(0, min(len(losses) - 1, int(len(losses) * share) - 1))
    return float(np.sort(losses)[::-1][place])


def _sizes(tokens: int, segment: int) -> Iterator[int]:
    """Yield the sizes of segments: the first has one less, the last what is left."""
    rest = tokens + 3 - segment
    if rest < 0:
        yield tokens + 2
        return
    yield segment - 1
    if rest > segment:
        yield from repeat(segment, rest // segment)
        rest %= segment
    if rest:
        yield rest


@dataclass(frozen=True)
class LLMLingua(TokenReducer):
    """Keep the tokens that surprise a language model after what was kept before them."""

    scorer: Backbone
    segment: int = 200
    granularity: float = 2.0
    form: Literal["paper", "published"] = "paper"

    def keep(self, text: Text, budget: int) -> Ints:
        if self.form == "published":
            whole = self_information(text.ids, self.scorer)
            prefix = CompressedPrefix(self.scorer)
            return published_choice(text.ids, text.protected, budget, self._length(), whole, prefix)
        places = np.flatnonzero(self._left_by_controller(text, budget))
        free = np.cumsum(~text.protected[places])  # tokens that may go, up to each one
        to_choose = budget - int(text.protected.sum())
        prefix, chosen_parts, length = CompressedPrefix(self.scorer), [], self._length()
        granted = 0
        for start in range(0, len(places), length):
            part = places[start : start + length]
            due = to_choose * int(free[start + len(part) - 1]) // max(1, int(free[-1]))
            protected = text.protected[part]
            share = due - granted + int(protected.sum())
            chosen = part[highest(prefix.score(text.ids[part]), protected, share)]
            prefix.append(text.ids[chosen])
            chosen_parts.append(chosen)
            granted = due
        return np.concatenate(chosen_parts)

    def _length(self) -> int:
        """Tokens of a segment; half the scorer's positions where that is fewer.

        The published form reads what stayed of a segment together with the next one: a quarter.
        """
        limit = self.scorer.max_positions
        share = 2 if self.form == "paper" else 4
        return self.segment if limit is None else min(self.segment, max(1, limit // share))

    def _left_by_controller(self, text: Text, budget: int) -> NDArray[np.bool_]:
        """Choose passages, those of the highest perplexity first, until they hold k budgets [T]."""
        remaining = np.ones(len(text.ids), dtype=bool)
        if self.granularity * budget >= len(text.ids):
            return remaining
        texts = token_texts(text.ids, self.scorer.require_tokenizer())
        numbers = passages(texts)
        parts = np.split(text.ids, np.flatnonzero(np.diff(numbers)) + 1)
        surprise = np.array([self_information(part, self.scorer).mean() for part in parts])
        remaining = text.protected.copy()
        for number in np.argsort(-surprise, kind="stable"):
            if remaining.sum() > self.granularity * budget:
                break
            remaining |= numbers == number
        return remaining
