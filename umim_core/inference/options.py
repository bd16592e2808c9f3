"""Options of a generation: one value that the library, the commands, the server and lm-eval fill.

Numbers and words among them have their meaning in ``config.generation``, where commands read it.
What is wrong with an option alone is refused when the value is made, what a model cannot do by
``check``. Settings of transformers that are not given come from the model's own generation_config,
then from transformers' defaults, as in ``transformers.generate`` (``of_model``); a test holds the
table of settings against transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Final, get_type_hints

from pydantic import ConfigDict, NonNegativeInt, ValidationError, create_model
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from umim_core.backbone.backbone import Backbone
from umim_core.config.form import check_merge, check_raw_tail
from umim_core.config.generation import PlainOptions
from umim_core.errors import GenerationError, did_you_mean, field_rule, require
from umim_core.inference.choice import (
    ON_IDS,
    PLAIN,
    WARPERS,
    Stopper,
    TokenChooser,
    end_ids,
    eos_ids,
    stop_texts,
)
from umim_core.inference.outputs import Observer
from umim_core.merging.merged_model import MergedModel
from umim_core.text.roles import check_roles

_NEW_TOKENS: Final = 64
DEFAULT_TOP_K: Final = 50  # transformers' own, where a model's file names none
HONOURED: Final = frozenset({
    *ON_IDS, *PLAIN, *WARPERS, "bad_words_ids", "do_sample", "eos_token_id", "max_new_tokens",
    "max_time", "min_length", "min_new_tokens", "num_return_sequences", "stop_strings",
})  # fmt: skip
# Settings that say how transformers runs or reports, and that change no token.
_WITHOUT_EFFECT: Final = frozenset(
    {"bos_token_id", "pad_token_id", "use_cache", "transformers_version", "return_dict_in_generate"}
)
# More of them, with those of beam search and of assistants: refused where a caller gives them to
# ``generate``, left out with a warning in an evaluation, never taken over from a model's file.
IGNORED: Final = _WITHOUT_EFFECT | {
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind",
    "cache_config", "cache_implementation", "compile_config", "decoder_start_token_id",
    "disable_compile", "diversity_penalty", "early_stopping", "is_assistant", "length_penalty",
    "low_memory", "max_cache_len", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "num_beam_groups", "output_attentions", "output_hidden_states", "output_logits",
    "output_scores", "prefill_chunk_size", "renormalize_logits", "target_lookbehind",
}  # fmt: skip
_NEUTRAL: Final[dict[str, object]] = {
    "num_beams": 1,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1.0,
}
_BEAMS: Final = frozenset(
    {"num_beams", "num_beam_groups", "early_stopping", "length_penalty", "diversity_penalty"}
)
# What transformers calls otherwise.
_ALIASES: Final = {"generation_config": "config", "num_return_sequences": "n"}
# What a GenerationConfig says itself, and the value of each that says nothing.
_SETTINGS: Final[dict[str, Any]] = {
    option.name: option.default
    for option in fields(PlainOptions)
    if option.name in {*vars(GenerationConfig()), "n"}  # type: ignore[no-untyped-call]
}
# Options of sampling, and the value of each that has no effect.
SAMPLING: Final[dict[str, object]] = {
    name: same[-1] for name, (same, _) in WARPERS.items() if name in _SETTINGS
} | {"seed": None, "streams": None}


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(PlainOptions):
    """Options of a generation; all of them may be left out.

    Attributes: those of ``PlainOptions``, and
        config: transformers' own settings; those down to ``n`` that are given override its own.
        logits_processor: Further processors, called per row with its raw ids [1, T].
        stopping_criteria: Further criteria, called per row with its raw ids [1, T].
        observer: Called after every forward (``outputs.Forward``).
    """

    config: GenerationConfig | None = None
    logits_processor: LogitsProcessorList | None = None
    stopping_criteria: StoppingCriteriaList | None = None
    observer: Observer | None = None

    @classmethod
    def of(cls, options: GenerateOptions | None, changes: Mapping[str, Any]) -> GenerateOptions:
        """Return options with changes by name; transformers' names are understood, too."""
        beams = sorted(_BEAMS & changes.keys())
        remedy = "Leave it out; n with do_sample gives several texts."
        _need(not beams, "beam search is not supported", ", ".join(beams), remedy)
        twice = [pair for pair in _ALIASES.items() if changes.keys() >= set(pair)]
        _need(not twice, "an option must be given once", twice, "Leave one of each two out.")
        given: object = options
        remedy = "Make one, or give them by name: generate(prompt, max_new_tokens=9)."
        known = given is None or isinstance(given, GenerateOptions)
        _need(known, "options must be a GenerateOptions", type(given).__name__, remedy)
        named = {_ALIASES.get(name, name): value for name, value in changes.items()}
        names = sorted(field.name for field in fields(cls))
        for name in named:
            if name not in names:
                hint = did_you_mean(name, names)
                raise TypeError(f"unknown option {name!r}; known are {', '.join(names)}. {hint}")
        return replace(options or cls(), **named)

    def __post_init__(self) -> None:
        """Refuse what no model could do."""
        said = vars(self.config) if isinstance(self.config, GenerationConfig) else {}
        given = {name: getattr(self, name) for name in _Types.model_fields}
        given = {name: said.get(name) if each is None else each for name, each in given.items()}
        if isinstance(self.streams, Sequence) and not isinstance(self.streams, str | bytes):
            given["streams"] = list(self.streams)
        try:
            _Types.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name, *place = first["loc"]
            field = ".".join(map(str, [name, *(part for part in place if isinstance(part, int))]))
            rule = field_rule(field, first)
            raise GenerationError(rule, first["input"], "Correct it.") from error
        _ = self.settings
        self._check_sampling(self.do_sample is not False)
        if self.merge is not None:
            check_merge(self.merge)
        if self.raw_tail is not None:
            check_raw_tail(self.raw_tail, self.merge or "prompt")
        if self.roles is not None:
            check_roles(self.roles)
        fits = self.decode_max_damage in (None, math.inf) or self.merge in (None, "all")
        rule = "decode_max_damage needs merging in the prompt and while decoding"
        _need(fits, rule, f"merge {self.merge!r}", "Merge all, or leave it out.")

    @property
    def _given(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in _SETTINGS}
        return {
            name: value
            for name, value in values.items()
            if value is not _SETTINGS[name]
            and not (isinstance(value, str) and value == _SETTINGS[name])
        }

    def _check_sampling(self, sampled: bool) -> None:
        given = self._given | {"seed": self.seed, "streams": self.streams}
        idle = [name for name, same in SAMPLING.items() if given.get(name) not in (None, same)]
        rule = f"{', '.join(SAMPLING)} need do_sample"
        _need(sampled or not idle, rule, idle, "Sample, or leave them out.")

    @cached_property
    def settings(self) -> GenerationConfig:
        """Transformers' settings: those given by name, over those of ``config``; others None."""
        settings = self._given
        if not settings and self.config is not None:
            return self.config
        if "n" in settings:
            settings["num_return_sequences"] = settings.pop("n")
        if "stop_strings" in settings:
            settings["stop_strings"] = stop_texts(settings["stop_strings"] or ()) or None
        if "top_k" in settings:  # None stands for what was not given
            settings["top_k"] = settings["top_k"] or 0
        if "eos_token_id" in settings:
            settings["eos_token_id"] = eos_ids(settings["eos_token_id"])
        return _checked((self.config.to_dict() if self.config else {}) | settings)

    def of_model(self, backbone: Backbone) -> GenerateOptions:
        """Return options in which settings not given are filled as transformers fills them.

        A length is not taken over (``max_length`` counts the prompt), nor is what changes no token.
        The text's end falls back to the tokenizer's. What could not choose a token is refused.
        """
        config = _checked(self.settings.to_dict())
        values = vars(config)
        for name, value in backbone.model.generation_config.to_dict().items():
            inherited = name not in IGNORED and name != "max_length" and _NEUTRAL.get(name) != value
            said = value is not None and value is not False  # 0 is said: a top_k of 0 keeps all
            if inherited and said and values.get(name, False) is None:
                values[name] = value
        if config.eos_token_id is None:
            config.eos_token_id = end_ids(backbone) or None
        if config.do_sample and config.top_k is None:
            config.top_k = DEFAULT_TOP_K
        if config.max_new_tokens is None:
            config.max_new_tokens = _NEW_TOKENS
        self._check_sampling(bool(config.do_sample))
        try:
            filled = replace(self, config=config)
            TokenChooser(config, [1], 0)
            Stopper(config, backbone.tokenizer)
        except GenerationError as error:
            own = "If the model's own generation_config.json says it, change it, or give another."
            raise GenerationError(error.rule, error.value, f"{error.remedy} {own}") from error
        return filled

    @property
    def samples(self) -> int:
        number = self.settings.num_return_sequences
        return 1 if number is None else int(number)

    def check(self, merged_model: MergedModel, prompts: int) -> GenerationConfig:
        """Return transformers' settings; refuse what a model cannot do for so many prompts."""
        config = self.settings
        new: object = config.max_new_tokens
        rule = "max_new_tokens must be an integer of at least 1"
        _need(isinstance(new, int) and new >= 1, rule, new, "Ask for one token or more.")
        allowed = HONOURED | _WITHOUT_EFFECT
        unknown = {
            name: value
            for name, value in config.to_diff_dict().items()
            if value is not None and not name.startswith("_") and _NEUTRAL.get(name) != value
            if name not in allowed
        }
        remedy = (
            "Leave the others out (beam search is not supported); where the model's own "
            "generation_config.json names them, change it, or give others in `config`."
        )
        _need(not unknown, f"generation settings must be among {sorted(HONOURED)}", unknown, remedy)
        fits = self.samples == 1 or (self.samples > 1 and bool(config.do_sample))
        rule = "num_return_sequences must be 1, or more with do_sample"
        _need(fits, rule, self.samples, "Sample, or ask for one.")
        rows = prompts * self.samples
        streams = rows if self.streams is None else len(self.streams)
        rule = "streams must be integers of at least 0, one per row"
        remedy = "Give as many as prompts times samples."
        _need(streams == rows, rule, f"{streams} for {rows} rows", remedy)
        ids = merged_model.backbone.vocab_size
        rule = f"logprobs must lie between 0 and {ids}"
        _need((self.logprobs or 0) <= ids, rule, self.logprobs, "Ask for fewer.")
        reads_raw = self.merge == "none" or merged_model.merge_depth > 0
        rule = "span_eviction reads prompt and generated tokens raw"
        found, remedy = f"merge {self.merge or 'all'!r}", "Merge none, or leave it out."
        _need(self.span_eviction is None or reads_raw, rule, found, remedy)
        return config

    def reading(self, merged_model: MergedModel) -> MergedModel:
        return merged_model.reading(self.merge or "all", self.raw_tail or 0)

    def merges_generated(self, merged_model: MergedModel) -> bool:
        return self.merge in (None, "all") and merged_model.matcher is not None

    def decode_bound(self, merged_model: MergedModel) -> float | None:
        """Return the most price of the rules that generated tokens merge by.

        The options' bound counts; without one, the model's own. None where all rules count, or
        generated tokens stay raw.
        """
        said, own = self.decode_max_damage, merged_model.decode_max_damage
        bound = own if said is None else said
        return bound if bound != math.inf and self.merges_generated(merged_model) else None


# Options that another check reads, transformers' own or ours: it takes more types than declared.
_CHECKED_APART: Final = {
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop_strings", "eos_token_id",
    "merge", "raw_tail", "roles",
}  # fmt: skip
_LISTS: Final[dict[str, Any]] = {  # a plain list will do
    **dict.fromkeys(("logits_processor", "stopping_criteria"), list[Any] | None),
    "streams": list[NonNegativeInt] | None,
}
_TYPES: Final[dict[str, Any]] = {
    name: (_LISTS.get(name, kind), ...)
    for name, kind in get_type_hints(GenerateOptions, include_extras=True).items()
    if name not in _CHECKED_APART
}
_Types = create_model(
    "_Types", __config__=ConfigDict(strict=True, arbitrary_types_allowed=True), **_TYPES
)


def _checked(settings: Mapping[str, Any]) -> GenerationConfig:
    try:
        return GenerationConfig(**settings)  # type: ignore[no-untyped-call]  # transformers' own
    except (TypeError, ValueError) as error:
        texts, sampled = settings.get("num_return_sequences"), settings.get("do_sample")
        if isinstance(texts, int) and texts > 1 and not sampled:
            rule, remedy = (
                "several texts of a prompt need sampling",
                "Add do_sample, or ask for one.",
            )
            raise GenerationError(rule, f"n (num_return_sequences) {texts}", remedy) from error
        rule, remedy = "a generation option is out of range", "Correct it, or leave it out."
        raise GenerationError(rule, str(error).rstrip("."), remedy) from error


def _need(ok: bool, rule: str, value: object, remedy: str) -> None:
    require(ok, GenerationError, rule, value, remedy)
