"""Texts generated after shortened prompts, cut to their limits, with their tokens and units.

UMIM and baselines that merge spans read prompts in units; a token reducer's prompts lose tokens
before they are read; policies of the cache read them raw, and drop columns after the prompt and
after every token, span eviction in a batch, the others row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Self

from transformers import GenerationConfig

from umim_core.baselines.policy_generation import generate_evicted
from umim_core.config.form import Merge
from umim_core.evaluation.gen_kwargs import Wanted
from umim_core.evaluation.method_scoring import (
    AnyScorer,
    EvictedScorer,
    ReducedScorer,
    evicted_sizes,
)
from umim_core.evaluation.scored_requests import UNKNOWN, Asked, Ints, Sizes
from umim_core.evaluation.scoring import Scorer
from umim_core.inference.engine import Engine
from umim_core.inference.outputs import RowOutput
from umim_core.inference.prompts import PromptIds
from umim_core.inference.request import Request
from umim_core.rules.matcher import Parts, parts_behind

REDUCTIONS: Final = ("prompt_tr", "gen_kv_tr", "cumulative_kv_tr")


class GeneratedText(str):
    """A text, and what its request saved; a plain string to everything else.

    Attributes:
        reductions: By name: ``prompt_tr``, (raw tokens - units) / raw tokens of the prompt;
            ``gen_kv_tr``, 1 - U_T / T; ``cumulative_kv_tr``, 1 - sum of U_t / sum of t, both over
            the T generated tokens that were fed.
    """

    reductions: Mapping[str, float]

    def __new__(cls, text: str, reductions: Mapping[str, float] | None = None) -> Self:
        """Make the text; a copy gets its reductions as state."""
        text_with_reductions = super().__new__(cls, text)
        text_with_reductions.reductions = dict(reductions or {})
        return text_with_reductions

    @classmethod
    def of_row(cls, text: str, row: RowOutput, tokens: int) -> Self:
        """Return a row's text with the row's reductions."""
        kv = (row.gen_kv_reduction, row.cumulative_kv_reduction)
        of_prompt = (tokens - row.prompt_units) / tokens
        return cls(text, dict(zip(REDUCTIONS, (of_prompt, *kv), strict=True)))


@dataclass(frozen=True)
class GeneratedRow:
    """A generated text."""

    output: RowOutput
    ids: tuple[int, ...]
    sizes: Sizes


@dataclass(frozen=True)
class RowWriter:
    """Generates texts after prompts that a scorer shortens.

    Attributes:
        scorer: Shortens prompts, and counts.
        merge: What the engine merges; nothing where a baseline deletes tokens or columns.
        age: Age at which spans leave the cache; None where none leave by age.
    """

    scorer: AnyScorer
    merge: Merge
    age: int | None = None

    @classmethod
    def of(cls, scorer: AnyScorer, merge: Merge) -> RowWriter:
        """Return the writer of a scorer."""
        if isinstance(scorer, Scorer):
            return cls(scorer, merge)
        return cls(scorer, "none", scorer.age if isinstance(scorer, EvictedScorer) else None)

    @cached_property
    def engine(self) -> Engine:
        """The engine of the scorer's model."""
        return Engine(self.scorer.merged_model)

    def write(
        self,
        prompts: Sequence[Ints],
        wanted: Wanted,
        request: Request,
        asked: Sequence[Asked] | None = None,
        parts: Sequence[Parts | None] | None = None,
    ) -> list[GeneratedRow]:
        """Generate a text after each prompt, in one batch.

        Args:
            prompts: Raw ids per prompt [T_b].
            wanted: Settings of the texts.
            request: The engine's own options; its ``merge`` is replaced.
            asked: What each prompt asks, for token reducers; None where that is not known.
            parts: Tokens of each prompt that may merge; None for all.

        Raises:
            GenerationError: If a prompt or the settings leave no room for a text.
            EvaluationError: If a single unit of a prompt has no room, or a policy breaks its
                protocol.
        """
        room = wanted.room(self.scorer.max_units)
        none = [None] * len(prompts)
        each = zip(prompts, asked or [UNKNOWN] * len(prompts), parts or none, strict=True)
        read = [self._read(ids, of, own, room) for ids, of, own in each]
        limits = wanted.limits([size.context_tokens for _, size in read])
        tail = 0 if self.merge == "none" else self.scorer.merged_model.raw_tail
        own = replace(request, merge=self.merge, raw_tail=tail, span_eviction=self.age)
        rows = self._rows([prompt for prompt, _ in read], wanted.settings(max(limits)), own)
        return [
            GeneratedRow(row, row.ids[:limit], self._counted(row, prompt, size))
            for row, limit, (prompt, size) in zip(rows, limits, read, strict=True)
        ]

    def _rows(
        self, prompts: Sequence[Ints | PromptIds], config: GenerationConfig, request: Request
    ) -> Sequence[RowOutput]:
        """Generate rows: under a cache policy one by one, otherwise by the engine."""
        if not isinstance(self.scorer, EvictedScorer) or self.age is not None:
            return self.engine.generate(prompts, config, request).rows
        parts = {_ids(prompt).tobytes(): _parts(prompt) for prompt in prompts}
        scorer = self.scorer
        return generate_evicted(
            [_ids(prompt) for prompt in prompts],
            config,
            request,
            scorer.merged_model.backbone,
            scorer.new_policy,
            lambda ids, generated: scorer.budget(ids, generated, parts[ids.tobytes()]),
        )

    def _read(
        self, ids: Ints, asked: Asked, parts: Parts | None, room: int
    ) -> tuple[Ints | PromptIds, Sizes]:
        """Return what is read of a prompt, with the sizes that are known before it is."""
        if isinstance(self.scorer, ReducedScorer):
            shortened = self.scorer.shorten(*self.scorer.fit(ids, room, parts), asked)
            return shortened.ids, shortened.sizes(0)
        fitted = (
            self.scorer.fit(ids, room, parts)[0] if isinstance(self.scorer, Scorer) else ids[-room:]
        )
        size = Sizes(context_tokens=len(fitted))
        behind = parts_behind(parts, len(ids) - len(fitted))
        return fitted if behind is None else PromptIds(fitted, behind), size

    def _counted(self, row: RowOutput, prompt: Ints | PromptIds, before: Sizes) -> Sizes:
        """Return the sizes of a finished row, and count them."""
        new, tokens = len(row.ids), before.context_tokens
        if isinstance(self.scorer, EvictedScorer):
            columns = row.cache_lengths[0]
            over = max(0, columns - self.scorer.budget(_ids(prompt), 0, _parts(prompt)))
            sizes = evicted_sizes(tokens, new, columns, over)
        else:
            units = row.cache_lengths[0]
            left = units + new - sum(length - 1 for _, length in row.generated_spans)
            sizes = Sizes(tokens + new, left, tokens, units, shortfall=before.shortfall)
        self.scorer.total += sizes
        return sizes


def _ids(prompt: Ints | PromptIds) -> Ints:
    return prompt.ids if isinstance(prompt, PromptIds) else prompt


def _parts(prompt: Ints | PromptIds) -> Parts | None:
    return prompt.parts if isinstance(prompt, PromptIds) else None
