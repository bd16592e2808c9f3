"""Texts generated after shortened prompts, cut to their limits, with their tokens and units.

Generation kwargs of lm-eval have the meaning that they have to its ``hf`` model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Self

from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from transformers import GenerationConfig

from umim_core.backbone.backbone import Backbone
from umim_core.baselines.eviction import generate_evicted
from umim_core.errors import GenerationError, require
from umim_core.evaluation.scoring import EvictedScorer, Query, RequestScorer
from umim_core.evaluation.sizes import REDUCTIONS, Sizes
from umim_core.inference.choice import eos_ids
from umim_core.inference.engine import Engine
from umim_core.inference.options import HONOURED, IGNORED, GenerateOptions
from umim_core.inference.outputs import Row
from umim_core.rules.matcher import Parts, PromptIds
from umim_core.text.token_ids import Ints

# Of ``GenerateOptions``, by the same names.
_OWN: Final = frozenset({"decode_max_damage"})
# lm-eval says ``until`` for stop strings, and repeats requests for several texts.
_ALLOWED: Final = HONOURED - {"num_return_sequences", "stop_strings"} | {"num_beams"} | _OWN


@dataclass(frozen=True)
class GenKwargs:
    """Generation settings of a group of requests."""

    options: GenerateOptions  # but for ``max_new_tokens``
    until: list[str]  # texts to cut the generated text at, the end of a text included
    new_tokens: int  # that a prompt leaves room for
    max_length: int | None  # of prompt and text together; None bounds the text alone

    def limits(self, prompt_lengths: Sequence[int]) -> list[int]:
        if self.max_length is None:
            return [self.new_tokens] * len(prompt_lengths)
        longest = max(prompt_lengths)
        rule = f"max_length ({self.max_length}) must exceed the prompt's tokens"
        remedy = "Use max_gen_toks instead, which counts generated tokens."
        require(longest < self.max_length, GenerationError, rule, longest, remedy)
        return [self.max_length - length for length in prompt_lengths]


def read_gen_kwargs(
    given: Mapping[str, Any],
    most: int,
    backbone: Backbone,
    end: tuple[int, str],
    warn: Callable[[str], object],
) -> GenKwargs:
    """Read the generation kwargs of a task, by default of so many tokens at most.

    Kwargs that change no token are left out with a warning. Where the task says nothing the model's
    own generation_config counts, then transformers' defaults.
    """
    try:
        settings = dict(normalize_gen_kwargs({**given, "until": given.get("until") or []}, most))
        if math.isnan(settings.get("temperature") or 0.0):  # it would be read as none
            raise ValueError("temperature nan")
    except (OverflowError, TypeError, ValueError) as error:
        rule = "max_gen_toks and temperature must be numbers"
        raise GenerationError(rule, str(error), "Correct the task's kwargs.") from error
    until = handle_stop_sequences(settings.pop("until"), end[1])
    new_tokens = settings.pop("max_gen_toks")
    max_length = settings.pop("max_length", None)
    if max_length is not None:
        rule, remedy = "max_length must be an integer", "Correct the task's kwargs."
        require(isinstance(max_length, int), GenerationError, rule, max_length, remedy)
        warn(f"umim: max_length={max_length} counts the prompt too; use max_gen_toks instead")
    if settings["do_sample"]:
        settings.setdefault("temperature", 0.0)  # as hf does, and refused as it is there
    else:
        settings.pop("temperature", None)
    for name in sorted(settings.keys() & IGNORED):
        warn(f"umim: generation kwarg {name}={settings.pop(name)!r} has no effect and is left out")
    unknown = sorted(settings.keys() - _ALLOWED)
    rule = f"generation kwargs must be among {sorted(_ALLOWED)}"
    remedy = "Leave the others out of the task's generation_kwargs."
    require(not unknown, GenerationError, rule, unknown, remedy)
    engine_options: dict[str, Any] = {name: settings.pop(name) for name in _OWN & settings.keys()}
    settings["stop_strings"] = [text for text in until if text and text != end[1]] or None
    try:
        config = GenerationConfig(**settings)  # type: ignore[no-untyped-call]  # transformers' own
        options = GenerateOptions(config=config, n=1, **engine_options).of_model(backbone)
    except ValueError as error:
        rule, remedy = "a generation kwarg is out of range", "Correct it in the task's kwargs."
        raise GenerationError(rule, str(error), remedy) from error
    ends = sorted({*eos_ids(options.settings.eos_token_id), end[0]})
    return GenKwargs(replace(options, eos_token_id=ends), until, new_tokens, max_length)


class GeneratedText(str):
    """A text, and what its request saved; a plain string to everything else.

    Attributes:
        reductions: By name: ``prompt_tr``, (raw tokens - units) / raw tokens of the prompt;
            ``gen_kv_tr``, 1 - U_T / T; ``cumulative_kv_tr``, 1 - sum of U_t / sum of t, both over
            the T generated tokens that were fed.
    """

    reductions: Mapping[str, float]

    def __new__(cls, text: str, reductions: Mapping[str, float] | None = None) -> Self:
        text_with_reductions = super().__new__(cls, text)
        text_with_reductions.reductions = reductions or {}
        return text_with_reductions

    @classmethod
    def of_row(cls, text: str, row: Row, tokens: int) -> Self:
        of_prompt = (tokens - row.prompt_units) / tokens
        values = (of_prompt, row.gen_kv_reduction, row.cumulative_kv_reduction)
        return cls(text, dict(zip(REDUCTIONS, values, strict=True)))


def write_rows(
    engine: Engine,
    scorer: RequestScorer,
    prompts: Sequence[tuple[Ints, Query, Parts | None]],
    kwargs: GenKwargs,
) -> list[tuple[Row, tuple[int, ...], Sizes]]:
    """Generate a text after each prompt, in one batch, as the scorer shortens and counts prompts.

    Prompts are raw ids [T_b], what they ask, for token reducers, and their tokens that may merge,
    None for all. With each row come the ids that count, and its sizes.
    """
    room = scorer.max_units - kwargs.new_tokens  # as many units as hf leaves a prompt tokens
    rule = f"max_gen_toks must be less than the model's maximum length ({scorer.max_units})"
    remedy = "Lower it, or use a backbone with more positions."
    require(room > 0, GenerationError, rule, kwargs.new_tokens, remedy)
    shortened = [scorer.prompt(ids, room, query, part) for ids, query, part in prompts]
    fitting, parts, sizes = zip(*shortened, strict=True)
    limits = kwargs.limits([size.context_tokens for size in sizes])
    method = scorer.method if isinstance(scorer, EvictedScorer) else None
    options = replace(
        kwargs.options,
        max_new_tokens=max(limits),
        raw_tail=0 if kwargs.options.merge == "none" else scorer.merged_model.raw_tail,
        span_eviction=None if method is None else method.age,
    )
    rows: Sequence[Row]
    if isinstance(scorer, EvictedScorer) and scorer.method.age is None:
        pairs = zip(fitting, parts, strict=True)
        budgets = [partial(scorer.budget, ids, parts=part) for ids, part in pairs]
        backbone, new_policy = scorer.merged_model.backbone, scorer.method.new_policy
        rows = generate_evicted(fitting, options, backbone, new_policy, budgets)
    else:
        inputs = list(map(PromptIds, fitting, parts))
        rows = engine.generate(inputs, options).rows
    counted = []
    for row, (ids, part, before) in zip(rows, shortened, strict=True):
        new, tokens, columns = len(row.ids), before.context_tokens, row.cache_lengths[0]
        if isinstance(scorer, EvictedScorer):
            counted.append(scorer.sizes(tokens, new, columns, scorer.budget(ids, 0, part)))
        else:
            units = columns + new - sum(length - 1 for _, length in row.generated_spans)
            counted.append(Sizes(tokens + new, units, tokens, columns, shortfall=before.shortfall))
    scorer.total = sum(counted, scorer.total)
    cut = [row.ids[:limit] for row, limit in zip(rows, limits, strict=True)]
    return list(zip(rows, cut, counted, strict=True))
