"""Request to the engine: the settings of transformers that it honours, and options of its own.

A setting that is not given comes from the model's own generation_config, then from transformers'
defaults, as in ``transformers.generate``; a test holds the table of settings against transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, get_args

from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from umim_core.backbone.backbone import Backbone
from umim_core.config.form import Merge, check_merge
from umim_core.errors import GenerationError
from umim_core.inference.outputs import Observer
from umim_core.inference.prompts import Overlong
from umim_core.inference.sampling import ON_IDS, PLAIN, WARPERS
from umim_core.inference.stopping import end_ids
from umim_core.merging.span_eviction import check_age

DEFAULT_TOP_K: Final = 50  # transformers' own, where a model's file names none
HONOURED: Final = frozenset(
    {
        *ON_IDS,
        *PLAIN,
        *WARPERS,
        "bad_words_ids",
        "do_sample",
        "eos_token_id",
        "max_new_tokens",
        "max_time",
        "min_length",
        "min_new_tokens",
        "num_return_sequences",
        "stop_strings",
    }
)
# Settings that say how transformers runs or reports, and that change no token.
_WITHOUT_EFFECT: Final = frozenset(
    {"bos_token_id", "pad_token_id", "use_cache", "transformers_version", "return_dict_in_generate"}
)
# More of them, with those of beam search and of assistants: refused where a caller gives them to
# ``generate``, left out with a warning in an evaluation, never taken over from a model's file.
IGNORED: Final = _WITHOUT_EFFECT | {
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_lookbehind",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "decoder_start_token_id",
    "disable_compile",
    "diversity_penalty",
    "early_stopping",
    "is_assistant",
    "length_penalty",
    "low_memory",
    "max_cache_len",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "prefill_chunk_size",
    "renormalize_logits",
    "target_lookbehind",
}
_NEUTRAL: Final[dict[str, object]] = {
    "num_beams": 1,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1.0,
}


def check_generation_config(config: GenerationConfig) -> None:
    """Refuse what the engine would otherwise ignore."""
    new = config.max_new_tokens
    if isinstance(new, bool) or not isinstance(new, int) or new < 1:
        raise GenerationError(
            "max_new_tokens must be an integer of at least 1", new, "Ask for one token or more."
        )
    unknown = sorted(
        name
        for name, value in config.to_diff_dict().items()
        if value is not None
        and name not in HONOURED | _WITHOUT_EFFECT
        and not name.startswith("_")
        and _NEUTRAL.get(name) != value
    )
    if unknown:
        raise GenerationError(
            f"generation settings must be among {sorted(HONOURED)}",
            {name: config.to_dict()[name] for name in unknown},
            "Leave the others out (beam search is not supported); where the model's own "
            "generation_config names them, give others in `config`.",
        )
    samples = samples_per_prompt(config)
    if samples < 1 or (samples > 1 and not config.do_sample):
        raise GenerationError(
            "num_return_sequences must be 1, or more with do_sample",
            samples,
            "Sample, or ask for one.",
        )


def samples_per_prompt(config: GenerationConfig) -> int:
    """Return how many rows each prompt gets."""
    return 1 if config.num_return_sequences is None else int(config.num_return_sequences)


def with_defaults(settings: GenerationConfig, backbone: Backbone) -> GenerationConfig:
    """Return settings in which those not given (None) are filled as transformers fills them.

    A length is not taken over (``max_length`` counts the prompt), nor is what changes no token. The
    text's end falls back to the tokenizer's.
    """
    config = GenerationConfig.from_dict(settings.to_dict())
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
    return config


@dataclass(frozen=True)
class Request:
    """The options of one call of the engine.

    Attributes:
        merge: What is merged: prompts and, in the cache, generated tokens; prompts; or nothing.
        match_border: Whether a rule may begin in the prompt and end in the generated tokens, or
            begin with the token that an earlier turn left unfed; in the paper's form none does. No
            rule reaches further into an earlier turn, or into what a chat's template writes.
        raw_tail: Last tokens of each prompt that stay raw; of a turn that continues another, of
            what is new in it.
        decode_max_damage: Generated tokens merge by the rules whose price is at most this, in nats
            per saved token (``RuleSet.prices``); prompts by all. Infinity takes all rules, None the
            model's own bound.
        span_eviction: A span of the rules that is so many tokens old keeps only its last column in
            the cache of raw tokens (``merging.span_eviction``): of all layers, with everything read
            raw, or of those below the merge depth. None keeps all.
        seed: For sampling; None draws one from torch's global generator.
        streams: Number of each row's random stream; by default the row's own number.
        overlong: What becomes of a prompt that the backbone has no room for: ``refuse``,
            ``truncate`` (leading units are dropped; not of a turn that continues another) or
            ``extend`` (rotary positions go on, with a warning).
        logprobs: How many of the most probable ids to report with each chosen one's
            log-probability; None reports neither.
        logits_processor: Further processors; see ``TokenChooser``.
        stopping_criteria: Further criteria; see ``Stopper``.
        streamer: Gets the prompt and each chosen id, as in transformers; one row only.
        observer: Called after every forward.
    """

    merge: Merge = "all"
    match_border: bool = False
    raw_tail: int = 0
    decode_max_damage: float | None = None
    span_eviction: int | None = None
    seed: int | None = None
    streams: Sequence[int] | None = None
    overlong: Overlong = "refuse"
    logprobs: int | None = None
    logits_processor: LogitsProcessorList | None = None
    stopping_criteria: StoppingCriteriaList | None = None
    streamer: BaseStreamer | None = None
    observer: Observer | None = None

    @property
    def reading(self) -> str:
        """Merge and raw tail for people."""
        return f"merge {self.merge}" + (f", raw tail {self.raw_tail}" if self.raw_tail else "")

    def check(self, vocab_size: int, rows: int, merge_depth: int = 0) -> None:
        """Refuse what cannot be done by a backbone with so many ids V, for so many rows.

        Above a merge depth of 0 the layers below it may evict what others merge.
        """
        check_merge(self.merge)
        for name, value in (
            ("logits_processor", self.logits_processor),
            ("stopping_criteria", self.stopping_criteria),
        ):
            if value is not None and not isinstance(value, list):
                raise GenerationError(
                    f"{name} must be a list", type(value).__name__, "Put it into a list."
                )
        if self.overlong not in get_args(Overlong):
            raise GenerationError(
                f"overlong must be one of {get_args(Overlong)}", self.overlong, "Choose one."
            )
        seed: object = self.seed
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise GenerationError("a seed must be an integer", seed, "Leave it out, or use 0.")
        if self.streamer is not None and rows != 1:
            raise GenerationError(
                "a streamer takes one row", f"{rows} rows", "Stream one prompt and one sample."
            )
        asked: object = self.logprobs
        if asked is not None and not (isinstance(asked, int) and 0 <= asked <= vocab_size):
            raise GenerationError(
                f"logprobs must lie between 0 and {vocab_size}", self.logprobs, "Ask for fewer."
            )
        most: object = self.decode_max_damage
        if most is not None and (
            isinstance(most, bool) or not isinstance(most, int | float) or math.isnan(most)
        ):
            raise GenerationError(
                "decode_max_damage must be a number of nats per saved token",
                most,
                "Give 0.2 for example, or inf to merge by all rules.",
            )
        decoding = {
            "match_border": self.match_border,
            "decode_max_damage": most not in (None, math.inf),
        }
        for name, wanted in decoding.items():
            if wanted and self.merge != "all":
                raise GenerationError(
                    f"{name} needs merging in the prompt and while decoding",
                    f"merge {self.merge!r}",
                    "Merge all, or leave it out.",
                )
        if self.span_eviction is not None:
            check_age(self.span_eviction)
            if self.merge != "none" and not merge_depth:
                raise GenerationError(
                    "span_eviction reads prompt and generated tokens raw",
                    f"merge {self.merge!r}",
                    "Merge none, or leave it out.",
                )
        if self.match_border and self.raw_tail:
            raise GenerationError(
                "match_border needs a prompt whose end may be merged",
                f"raw_tail {self.raw_tail}",
                "Leave one of them out.",
            )
