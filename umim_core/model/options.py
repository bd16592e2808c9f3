"""Options of ``UMIM.generate`` and ``UMIM.stream``, translated for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final, TypedDict, cast

from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from umim_core.backbone.backbone import Backbone
from umim_core.checkpoint.checkpoint_files import CheckpointConfig
from umim_core.config.form import Merge
from umim_core.errors import GenerationError
from umim_core.inference.outputs import GenerationState, Observer, Prefix
from umim_core.inference.prompts import Overlong
from umim_core.inference.request import Request, with_defaults
from umim_core.inference.stopping import eos_ids, stop_texts
from umim_core.model.inputs import Mask, PromptInput

_INTEGERS: Final = ("max_new_tokens", "min_new_tokens", "no_repeat_ngram_size", "n")
_SAMPLING: Final[dict[str, tuple[object, ...]]] = {  # the values without effect
    "temperature": (1.0,),
    "top_k": (None, 0),
    "top_p": (1.0,),
    "min_p": (None,),
}
_NEW_TOKENS: Final = 64
_BEAMS: Final = frozenset(
    {"num_beams", "num_beam_groups", "early_stopping", "length_penalty", "diversity_penalty"}
)
# What transformers calls otherwise.
_ALIASES: Final = {"generation_config": "config", "num_return_sequences": "n"}


class GenerateOptions(TypedDict, total=False):
    """Options of a generation; all of them may be left out.

    A setting that is left out is that of the model's own generation_config, then transformers'
    default, as in ``transformers.generate``; but ``max_new_tokens`` is 64.

    Attributes:
        input_ids: transformers' name of the prompts: ``generate(**tokenizer(text))``.
        attention_mask: 1 where the ids of prompts count, 0 at padding (all count).
        config: transformers' own settings, in place of those down to ``n``.
        generation_config: Another name of ``config``.
        max_new_tokens: Most tokens to generate per prompt (64).
        min_new_tokens: Fewest tokens before an end-of-sequence token may come (0).
        do_sample: Sample; otherwise take the most probable token (False).
        temperature: Divides the logits when sampling (1).
        top_k: Keep the k most probable tokens when sampling (50); 0 or None keeps all.
        top_p: Keep the smallest set of tokens with this probability when sampling (1).
        min_p: Keep tokens of at least this share of the most probable one's probability when
            sampling (None: all).
        repetition_penalty: Above 1 makes tokens of prompt and output less likely (1).
        no_repeat_ngram_size: No n-gram of this size occurs twice (0: any may).
        stop_strings: End a row when its generated text ends with this, or one of these (none).
        eos_token_id: One or several ids that end a row (the model's, else the tokenizer's); None
            lets no id end it.
        n: Samples per prompt, which share its prefill (1).
        num_return_sequences: Another name of ``n``.
        seed: For sampling; equal seeds give equal draws, and equal texts in an equal batch: in
            another one products may round otherwise, which float32 hardly ever shows and bfloat16
            often. None draws one from torch's global generator, so that every call samples anew
            and ``torch.manual_seed`` repeats them all.
        merge: ``all`` (prompt and generated tokens), ``prompt``, or ``none`` (the base model); by
            default what the checkpoint recommends, else ``all``.
        match_border: Whether a rule may begin in the prompt and end in the output (False).
        raw_tail: Last tokens of each prompt that stay raw (what the checkpoint recommends, else
            0); with ``past``, of what is added.
        decode_max_damage: Merge generated spans only by rules whose price is at most this, in nats
            per saved token, as ``umim prune`` measured it; ``math.inf`` for all rules (the
            checkpoint's own bound, if it has one). Prompts merge by all rules.
        span_eviction: Read everything raw (``merge="none"``), and keep of a rule's span only the
            last column of the cache once it is so many tokens old (None: keep all); not with
            ``past``, and the output's state cannot be continued.
        overlong: What becomes of a prompt that does not fit the context with its new tokens:
            ``refuse``, ``truncate`` (leading units are dropped, a BOS stays; not where ``past`` is
            continued) or ``extend`` (rotary positions go on, with a warning).
        logprobs: How many of the most probable ids to report per step, with the log-probability
            of the chosen one; None reports neither.
        past: State of an earlier output, or what ``UMIM.prefix`` returns; the prompts are what is
            added to it.
        add_special_tokens: Whether texts get special tokens, a BOS say (as the tokenizer does by
            default, and none behind ``past``). Chats never get any: their template writes them.
        logits_processor: Further processors, called per row with its raw ids [1, T].
        stopping_criteria: Further criteria, called per row with its raw ids [1, T].
        streamer: transformers' streamer; one row only.
        observer: Called after every forward (``outputs.Forward``).
    """

    input_ids: PromptInput | None
    attention_mask: Mask | None
    config: GenerationConfig | None
    generation_config: GenerationConfig | None
    max_new_tokens: int
    min_new_tokens: int
    do_sample: bool
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float | None
    repetition_penalty: float
    no_repeat_ngram_size: int
    stop_strings: str | Sequence[str]
    eos_token_id: int | Sequence[int] | None
    n: int
    num_return_sequences: int
    seed: int | None
    merge: Merge
    match_border: bool
    raw_tail: int
    decode_max_damage: float | None
    span_eviction: int | None
    overlong: Overlong
    logprobs: int | None
    past: GenerationState | Prefix | None
    add_special_tokens: bool | None
    logits_processor: LogitsProcessorList | None
    stopping_criteria: StoppingCriteriaList | None
    streamer: BaseStreamer | None
    observer: Observer | None


# What a GenerationConfig says itself.
_SETTINGS: Final = (
    "max_new_tokens", "min_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p",
    "repetition_penalty", "no_repeat_ngram_size", "stop_strings", "eos_token_id", "n",
)  # fmt: skip


def check_options(options: GenerateOptions) -> GenerateOptions:
    """Return options under our own names."""
    beams = sorted(_BEAMS.intersection(options))
    if beams:
        raise GenerationError(
            "beam search is not supported",
            ", ".join(beams),
            "Leave it out; n with do_sample gives several texts.",
        )
    unknown = sorted(set(options) - set(GenerateOptions.__annotations__))
    if unknown:
        known = ", ".join(sorted(GenerateOptions.__annotations__))
        raise TypeError(f"unknown options {unknown}; known are {known}")
    for alias, name in _ALIASES.items():
        if alias in options and name in options:
            raise GenerationError(
                "an option must be given once", f"{alias} and {name}", "Leave one of them out."
            )
    past: object = options.get("past")
    if past is not None and not isinstance(past, GenerationState | Prefix):
        raise GenerationError(
            "past must be a state or a prefix",
            type(past).__name__,
            "Pass output.state, or what umim.prefix returned.",
        )
    named = {_ALIASES.get(name, name): value for name, value in options.items()}
    return cast("GenerateOptions", named)


def with_recommended(options: GenerateOptions, config: CheckpointConfig) -> GenerateOptions:
    """Return options with what the checkpoint recommends where the caller said nothing.

    An option of merging while decoding implies ``merge="all"``; with an open border no tail is raw.
    ``match_border=False`` is the default and implies nothing.
    """
    merge, raw_tail = config.recommended(options.get("merge"), options.get("raw_tail"))
    border, damage = options.get("match_border"), options.get("decode_max_damage")
    if "merge" not in options and (border or damage is not None):
        merge = "all"
    if border and "raw_tail" not in options:
        raw_tail = 0
    return cast("GenerateOptions", {**options, "merge": merge, "raw_tail": raw_tail})


def generation_config(options: GenerateOptions, backbone: Backbone) -> GenerationConfig:
    """Return transformers' settings for the options, with what was not given filled in."""
    config_option = options.get("config")
    given: object = config_option
    if given is not None and not isinstance(given, GenerationConfig):
        raise GenerationError(
            "config must be a GenerationConfig of transformers",
            type(given).__name__,
            "Make one, or give its settings as options.",
        )
    if config_option is not None:
        twice = [name for name in _SETTINGS if name in options]
        if twice:
            raise GenerationError(
                "settings must be given in config or as options, not both",
                twice,
                "Put them into config.",
            )
    try:
        config = with_defaults(
            _sampling_config(options, backbone) if config_option is None else config_option,
            backbone,
        )
    except (TypeError, ValueError) as error:
        raise GenerationError(
            "a generation option is out of range",
            str(error).rstrip("."),
            "Correct it, or leave it out.",
        ) from error
    if config.max_new_tokens is None:
        config.max_new_tokens = _NEW_TOKENS
    return config


def _sampling_config(options: GenerateOptions, backbone: Backbone) -> GenerationConfig:
    """Return the options that were given as settings, all others None."""
    settings: dict[str, Any] = {name: options[name] for name in _SETTINGS if name in options}
    for name in _INTEGERS:
        value: object = settings.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int):
            raise GenerationError(f"{name} must be an integer", value, "Give a whole number.")
    sampled = settings.get("do_sample", bool(backbone.model.generation_config.do_sample))
    ignored = [name for name, same in _SAMPLING.items() if settings.get(name, same[0]) not in same]
    if ignored and not sampled:
        raise GenerationError(
            f"{', '.join(_SAMPLING)} need do_sample", ignored, "Sample, or leave them out."
        )
    settings["do_sample"] = sampled
    if "n" in settings:
        settings["num_return_sequences"] = settings.pop("n")
    if "stop_strings" in settings:
        settings["stop_strings"] = stop_texts(settings["stop_strings"] or ()) or None
    if "top_k" in settings:  # None stands for what was not given
        settings["top_k"] = settings["top_k"] or 0
    if "eos_token_id" in settings:
        settings["eos_token_id"] = _end_ids(settings["eos_token_id"])
    return GenerationConfig(**settings)  # type: ignore[no-untyped-call]  # transformers' own


def _end_ids(option: int | Sequence[int] | None) -> list[int]:
    try:
        return eos_ids(option)
    except (TypeError, ValueError) as error:
        raise GenerationError(
            "eos_token_id must be one id or several", option, "Give whole numbers, or None."
        ) from error


def request(options: GenerateOptions, streamer: BaseStreamer | None = None) -> Request:
    """Return what the options ask of the engine: those that are fields of ``Request``.

    ``UMIM.stream`` reads a streamer of its own; no other may be given with it.
    """
    if streamer is not None and options.get("streamer") is not None:
        raise GenerationError(
            "stream yields the text itself", "streamer", "Pass a streamer to generate."
        )
    set_options = dict(options) if streamer is None else {**options, "streamer": streamer}
    named: dict[str, Any] = {
        field.name: set_options[field.name]
        for field in fields(Request)
        if field.name in set_options
    }
    return Request(**named)
