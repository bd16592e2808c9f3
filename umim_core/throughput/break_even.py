"""Measured speeds of base and UMIM, and from which length and token reduction on UMIM pays.

UMIM pays where even the lower quartile of the speed-up is above 1. It pays *from* a length if it
does so at that and at every longer measured length: one lucky cell is no break-even.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from umim_core.config.evaluate import RuleKind

Phase = Literal["prefill", "decode", "request"]
PHASES: Final[tuple[Phase, ...]] = ("prefill", "decode", "request")


@dataclass(frozen=True)
class ThroughputRow:
    """One measured speed, base and UMIM side by side.

    The token reduction is realised: of the prompts for prefill, of the cache's mean length for
    decode, of its last length for request.
    """

    phase: Phase  # reading the prompt up to the first token, the tokens after that, or both
    rules: RuleKind
    asked_reduction: float | None  # that fixed pairs were made for; None for natural rules
    prompt_tokens: int  # raw, of each prompt
    new_tokens: int  # per row of the batch
    batch_size: int
    token_reduction: float
    base_seconds: float  # median; for prefill the time to the first token
    umim_seconds: float
    base_tokens_per_s: float  # original tokens, at the median time
    umim_tokens_per_s: float
    speedup: float  # median of the ratios of alternating pairs, with their quartiles
    speedup_low: float
    speedup_high: float
    bound: float  # at this token reduction; for request, at the base model's times of the phases
    pairs: int
    base_flops_per_s: float  # at the median time, below the device's ceiling
    umim_flops_per_s: float
    base_kv_bytes: int  # keys and values of all rows at the end of the phase
    umim_kv_bytes: int
    base_peak_bytes: int | None  # see ``peak_bytes``
    umim_peak_bytes: int | None

    @property
    def pays(self) -> bool:
        return self.speedup_low > 1.0 and self.token_reduction > 0.0  # without merges it is noise

    @property
    def label(self) -> str:
        asked = self.asked_reduction
        return self.rules if asked is None else f"pairs {100 * asked:.3g} %"


def pays_from(rows: Sequence[ThroughputRow]) -> int | None:
    """Return the least length from which all of these rows, of rising length, pay."""
    shortest = None
    for row in reversed(rows):
        if not row.pays:
            break
        shortest = row.prompt_tokens
    return shortest


def break_even(rows: Sequence[ThroughputRow]) -> list[dict[str, Any]]:
    """Return from which length on UMIM pays, for each phase, batch size and kind of rules.

    Reductions and speed-ups (median, quartiles) are those realised at each prompt length, rising;
    ``pays_from`` is None if UMIM does not pay at the longest.
    """
    ordered = sorted(rows, key=lambda x: (x.batch_size, PHASES.index(x.phase), x.prompt_tokens))
    kinds: dict[tuple[Phase, int, str], list[ThroughputRow]] = {}
    for row in ordered:
        kinds.setdefault((row.phase, row.batch_size, row.label), []).append(row)
    return [
        {
            "phase": series[0].phase,
            "rules": series[0].rules,
            "asked_reduction": series[0].asked_reduction,
            "batch_size": series[0].batch_size,
            "new_tokens": series[0].new_tokens,
            "prompt_tokens": [row.prompt_tokens for row in series],
            "token_reductions": [row.token_reduction for row in series],
            "speedups": [row.speedup for row in series],
            "speedups_low": [row.speedup_low for row in series],
            "speedups_high": [row.speedup_high for row in series],
            "pays_from": pays_from(series),
        }
        for series in kinds.values()
    ]
