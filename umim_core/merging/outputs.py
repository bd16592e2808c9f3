"""What the engine hands back, and what it shows while it runs.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from umim_core.merging.sampling import StopReason

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RowOutput:
    """One generated row.

    Attributes:
        ids: Generated raw ids; an end-of-sequence id that ended the row is included.
        prompt_length: Raw prompt tokens.
        prompt_spans: Merged spans of the prompt as (start, length) in raw prompt tokens.
        generated_spans: Merged spans among the generated tokens that were fed (all but the last).
        cache_lengths: Units in the cache after the prefill and after each fed token; as many
            entries as generated ids.
        stop_reason: ``eos``, ``stop_string`` or ``length``.
    """

    ids: tuple[int, ...]
    prompt_length: int
    prompt_spans: Spans
    generated_spans: Spans
    cache_lengths: tuple[int, ...]
    stop_reason: StopReason

    @property
    def token_reduction(self) -> float:
        """(raw tokens - units) / raw tokens of the prompt."""
        return (self.prompt_length - self.cache_lengths[0]) / self.prompt_length

    @property
    def gen_kv_reduction(self) -> float:
        """(tokens fed - units kept) / tokens fed; 0 when no token was fed."""
        fed = len(self.ids) - 1
        return (fed - self.cache_lengths[-1] + self.cache_lengths[0]) / fed if fed else 0.0


@dataclass(frozen=True)
class EngineOutput:
    """Generated rows, in the order of the prompts.

    Attributes:
        rows: One entry per prompt.
    """

    rows: tuple[RowOutput, ...]


@dataclass(frozen=True)
class Forward:
    """What an observer sees after each forward.

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
