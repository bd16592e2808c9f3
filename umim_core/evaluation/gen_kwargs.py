"""Generation kwargs of lm-eval, with the meaning they have to lm-eval's ``hf`` model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Final

from transformers import GenerationConfig

from umim_core.backbone.backbone import Backbone
from umim_core.errors import GenerationError
from umim_core.inference.request import HONOURED, IGNORED, Request, with_defaults
from umim_core.inference.stopping import eos_ids

# lm-eval says ``until`` for stop strings, and repeats requests for several texts.
_ALLOWED: Final = HONOURED - {"num_return_sequences", "stop_strings"} | {"num_beams"}
# Of ``Request``, by the same names.
_OWN: Final = frozenset({"decode_max_damage"})


@dataclass(frozen=True)
class Wanted:
    """Generation settings of a group of requests.

    Attributes:
        config: Settings of the engine, but for ``max_new_tokens``.
        until: Texts to cut the generated text at, the end of a text included.
        new_tokens: Tokens that a prompt leaves room for.
        max_length: Most tokens of prompt and text together; None bounds the text alone.
        request: The engine's own options among the kwargs; the others have their defaults.
    """

    config: GenerationConfig
    until: list[str]
    new_tokens: int
    max_length: int | None
    request: Request

    def room(self, max_units: int) -> int:
        """Return how many units a prompt may have, as many as hf leaves it tokens.

        Raises:
            GenerationError: If nothing is left.
        """
        if self.new_tokens >= max_units:
            raise GenerationError(
                f"max_gen_toks must be less than the model's maximum length ({max_units})",
                self.new_tokens,
                "Lower it, or use a backbone with more positions.",
            )
        return max_units - self.new_tokens

    def settings(self, new_tokens: int) -> GenerationConfig:
        """Return the settings of the engine for so many new tokens."""
        config = copy(self.config)
        config.max_new_tokens = new_tokens
        return config

    def limits(self, prompt_lengths: Sequence[int]) -> list[int]:
        """Return the most tokens to generate behind each prompt.

        Raises:
            GenerationError: If a prompt leaves no room in ``max_length``.
        """
        if self.max_length is None:
            return [self.new_tokens] * len(prompt_lengths)
        limits = [self.max_length - length for length in prompt_lengths]
        if min(limits) < 1:
            raise GenerationError(
                f"max_length ({self.max_length}) must exceed the prompt's tokens",
                max(prompt_lengths),
                "Use max_gen_toks instead, which counts generated tokens.",
            )
        return limits


def read_gen_kwargs(
    settings: dict[str, Any],
    until: list[str],
    backbone: Backbone,
    end: tuple[int, str],
    warn: Callable[[str], object],
) -> Wanted:
    """Read the generation kwargs of a task.

    Kwargs that change no token are left out with a warning. Where the task says nothing the model's
    own generation_config counts, then transformers' defaults.

    Raises:
        GenerationError: If a kwarg is unknown or out of range.
    """
    new_tokens = settings.pop("max_gen_toks")
    max_length = settings.pop("max_length", None)
    if max_length is not None:
        warn(f"umim: max_length={max_length} counts the prompt too; use max_gen_toks instead")
    if settings["do_sample"]:
        settings.setdefault("temperature", 0.0)  # as hf does, and refused as it is there
    else:
        settings.pop("temperature", None)
    for name in sorted(settings.keys() & IGNORED):
        warn(f"umim: generation kwarg {name}={settings.pop(name)!r} has no effect and is left out")
    own: dict[str, Any] = {name: settings.pop(name) for name in _OWN & settings.keys()}
    unknown = sorted(settings.keys() - _ALLOWED)
    if unknown:
        raise GenerationError(
            f"generation kwargs must be among {sorted(_ALLOWED | _OWN)}",
            unknown,
            "Leave the others out of the task's generation_kwargs.",
        )
    settings["stop_strings"] = [text for text in until if text and text != end[1]] or None
    try:
        own_config = GenerationConfig(**settings)  # type: ignore[no-untyped-call]  # transformers' own
        config = with_defaults(own_config, backbone)
    except ValueError as error:
        raise GenerationError(
            "a generation kwarg is out of range",
            str(error),
            "Correct it in the task's generation_kwargs or in --gen_kwargs.",
        ) from error
    config.eos_token_id = sorted({*eos_ids(config.eos_token_id), end[0]})
    return Wanted(config, until, new_tokens, max_length, Request(**own))
