"""Options of a generation that are numbers and words; light to import, for commands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import NonNegativeInt

from umim_core.config.form import Merge
from umim_core.text.roles import Role


@dataclass(frozen=True, kw_only=True)
class PlainOptions:
    """Options of a generation, checked by ``inference.options.GenerateOptions``.

    A setting down to ``n`` that is left out (None or ``"model"``) is that of the model's own
    generation_config, then transformers' default, but 64 for ``max_new_tokens``. Commands show the
    first sentence of each.

    Attributes:
        max_new_tokens: Most tokens to generate per prompt (the model's, else 64).
        min_new_tokens: Fewest tokens before an end-of-sequence token may come (0).
        do_sample: Sample; otherwise take the most probable token (the model's, else False).
        temperature: Divides the logits when sampling (the model's, else 1).
        top_k: Keep the k most probable tokens when sampling, 0 all (the model's, else 50). None
            keeps all, too.
        top_p: Keep the smallest set of tokens with this probability when sampling
            (the model's, else 1).
        min_p: Keep tokens of at least this share of the most probable one's probability when
            sampling (all).
        repetition_penalty: Above 1 makes tokens of prompt and output less likely (the model's,
            else 1).
        no_repeat_ngram_size: No n-gram of this size occurs twice; 0: any may (0).
        stop_strings: End a row when its generated text ends with this, or one of these.
        eos_token_id: One or several ids that end a row (the model's, else the tokenizer's). None
            lets no id end it.
        n: Samples per prompt, which share its prefill (1).
        seed: Seed of what is sampled; by default every call samples anew. Equal seeds give equal
            draws, and equal texts in an equal batch: in another one products may round otherwise,
            which float32 hardly ever shows and bfloat16 often. None draws one from torch's global
            generator, so that ``torch.manual_seed`` repeats all calls.
        streams: Number of each row's random stream; by default the row's own number.
        merge: What is merged; ``all`` is prompt and generated tokens, ``none`` the base model (what
            the checkpoint recommends, else all).
        raw_tail: Last tokens of each prompt that stay raw (what the checkpoint recommends for its
            own merge, else 0). Of a turn that continues another, of what is added.
        roles: Whose contents of a chat merge: user, system, tools for their schemas, tool for their
            results (what the checkpoint recommends, else user). Texts and ids have no roles.
        decode_max_damage: Merge generated spans only by rules whose price is at most this, in nats
            per saved token, as ``umim prune`` measured it; inf: by all (the checkpoint's own bound,
            if it has one). Prompts merge by all rules.
        span_eviction: With merge none, read everything raw, and keep of a rule's span only the last
            column of the cache once it is so many tokens old. None keeps all; above a merge depth
            of 0 the layers below it may evict what others merge. Not with ``past``, and the
            output's state cannot be continued.
        logprobs: Report the log-probability of each token, and so many of the most probable ids.
            None reports neither.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | Literal["model"] | None = "model"
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    stop_strings: str | Sequence[str] | None = None
    eos_token_id: int | Sequence[int] | Literal["model"] | None = "model"  # noqa: S105  no secret
    n: int | None = None
    seed: NonNegativeInt | None = None
    streams: Sequence[NonNegativeInt] | None = None
    merge: Merge | None = None
    raw_tail: int | None = None
    roles: Sequence[Role] | None = None
    decode_max_damage: Annotated[float, Ge(-math.inf)] | None = None  # a number
    span_eviction: NonNegativeInt | None = None
    logprobs: NonNegativeInt | None = None
