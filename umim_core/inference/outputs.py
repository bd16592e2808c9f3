"""Outputs of the engine, and what it shows while it runs.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from umim_core.inference.state import GenerationState
from umim_core.inference.stopping import StopReason

Spans = tuple[tuple[int, int], ...]
TopTokens = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class RowOutput:
    """One generated row.

    Attributes:
        ids: Generated raw ids; an end-of-sequence id that ended the row is included.
        prompt_ids: The raw ids that were prefilled: the prompt, behind an earlier turn's last token
            where a state was continued.
        prompt_units: Units they were prefilled as.
        prompt_spans: Their merged spans as (start, length) in raw prompt tokens. One that border
            matching took back is left out.
        generated_spans: Merged spans among the generated tokens that were fed (all but the last).
            With border matching a start may be negative: the span begins in the prompt.
        cache_lengths: Units in the cache after the prefill and after each fed token; as many
            entries as generated ids. A continued state counts from what it held.
        stop_reason: ``eos``, ``stop_string``, ``criteria`` or ``length``.
        logprobs: The model's log-probability of each generated id, before any processor; None
            unless asked for.
        top_logprobs: The most probable (id, log-probability) at each step, most probable first;
            None unless asked for.
    """

    ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    prompt_units: int
    prompt_spans: Spans
    generated_spans: Spans
    cache_lengths: tuple[int, ...]
    stop_reason: StopReason
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[TopTokens, ...] | None = None

    @property
    def prompt_length(self) -> int:
        """Raw prompt tokens."""
        return len(self.prompt_ids)

    @property
    def token_reduction(self) -> float:
        """(raw tokens - units) / raw tokens of the prompt."""
        return (self.prompt_length - self.prompt_units) / self.prompt_length

    @property
    def gen_kv_reduction(self) -> float:
        """1 - U_T / T: entries saved at the end among the T generated tokens fed; 0 if T = 0.

        Above 1 where border matching took more units of the prompt back than the tokens added.

        Source: paper, "Generation Quality" (Gen-KV TR).
        """
        fed = len(self.ids) - 1
        return (fed - self.cache_lengths[-1] + self.cache_lengths[0]) / fed if fed else 0.0

    @property
    def cumulative_kv_reduction(self) -> float:
        """1 - sum U_t / sum t over the T generated tokens fed; 0 if T = 0.

        Source: paper, "Generation Quality" (cumulative KV TR).
        """
        fed = len(self.ids) - 1
        held = sum(self.cache_lengths[1:]) - fed * self.cache_lengths[0]
        return 1.0 - held / (fed * (fed + 1) / 2) if fed else 0.0


@dataclass(frozen=True)
class Timings:
    """Time of a request by phase.

    Attributes:
        first_token: Seconds from the ids to the first token chosen: matching, merging, prefill.
        decode: Seconds from there to the last token chosen, without what a consumer of the stream
            did in between.
    """

    first_token: float
    decode: float


@dataclass(frozen=True)
class EngineOutput:
    """Generated rows, in the order of the prompts; samples of one prompt stand side by side.

    Attributes:
        rows: One entry per prompt and sample.
        timings: Where the time went.
        state: The cache and the raw ids, to continue with another turn.
    """

    rows: tuple[RowOutput, ...]
    timings: Timings = field(compare=False)
    state: GenerationState = field(compare=False, repr=False)


@dataclass(frozen=True)
class Forward:
    """State of a generation after one forward, for observers.

    Attributes:
        logits: Next-token logits [B, V].
        lengths: Units held per row [B] (int64, CPU).
        generated: Generated ids per row so far; all of a running row's ids have been fed.
        running: Whether a row has not ended [B] (bool, CPU).
    """

    logits: Tensor
    lengths: Tensor
    generated: tuple[tuple[int, ...], ...]
    running: Tensor


Observer = Callable[[Forward], None]
