"""Options of a generation request, beyond transformers' own settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from umim_core.errors import GenerationError
from umim_core.inference.outputs import Observer
from umim_core.inference.prompts import Overlong


@dataclass(frozen=True)
class Request:
    """The options of one call of the engine.

    Attributes:
        merge_prompt: Whether prompts are compressed.
        merge_decode: Whether generated tokens are merged in the cache.
        match_border: Whether a rule may begin in the prompt and end in the generated tokens, or
            begin with the token that an earlier turn left unfed; in the paper's form none does. No
            rule reaches further into an earlier turn.
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

    merge_prompt: bool = True
    merge_decode: bool = True
    match_border: bool = False
    seed: int | None = None
    streams: Sequence[int] | None = None
    overlong: Overlong = "refuse"
    logprobs: int | None = None
    logits_processor: LogitsProcessorList | None = None
    stopping_criteria: StoppingCriteriaList | None = None
    streamer: BaseStreamer | None = None
    observer: Observer | None = None

    def check(self, vocab_size: int, rows: int) -> None:
        """Refuse what cannot be done.

        Args:
            vocab_size: Ids V of the backbone.
            rows: Rows to generate.

        Raises:
            GenerationError: If more log-probabilities are asked for than there are ids, the border
                is to be matched without both kinds of merging, or several rows are to be streamed.
        """
        for name, given in (
            ("logits_processor", self.logits_processor),
            ("stopping_criteria", self.stopping_criteria),
        ):
            if given is not None and not isinstance(given, list):
                raise GenerationError(
                    f"{name} must be a list", type(given).__name__, "Put it into a list."
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
        if self.match_border and not (self.merge_prompt and self.merge_decode):
            raise GenerationError(
                "match_border needs merging in the prompt and while decoding",
                f"merge_prompt {self.merge_prompt}, merge_decode {self.merge_decode}",
                "Merge both, or leave it out.",
            )
