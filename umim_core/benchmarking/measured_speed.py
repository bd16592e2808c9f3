"""Measured speed of base and UMIM at one length and batch size."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from umim_core.config.benchmark import RuleKind

Phase = Literal["prefill", "decode", "request"]


@dataclass(frozen=True)
class ThroughputRow:
    """One measured speed, base and UMIM side by side.

    Attributes:
        phase: Reading the prompt up to the first token, the tokens after that, or both together.
        rules: What was merged.
        asked_reduction: The token reduction that fixed pairs were made for; None for natural rules.
        prompt_tokens: Raw tokens of each prompt.
        new_tokens: Generated tokens per row.
        batch_size: Rows.
        token_reduction: Realised: of the prompts for prefill, of the cache's mean length for
            decode, of its last length for request.
        base_seconds: Median time, base model; for prefill the time to the first token.
        umim_seconds: The same for UMIM.
        base_tokens_per_s: Original tokens per second, base model (median).
        umim_tokens_per_s: The same for UMIM.
        speedup: Median of the pairs' ratios.
        speedup_low: Their lower quartile.
        speedup_high: Their upper quartile.
        bound: Largest speed-up possible at this token reduction; for request, at the base model's
            own times of the two phases.
        pairs: Alternating pairs measured.
        base_flops_per_s: FLOP/s of the base model (median time), below the device's ceiling.
        umim_flops_per_s: The same for UMIM.
        base_kv_bytes: Keys and values of all rows at the end of the phase, base model.
        umim_kv_bytes: The same for UMIM.
        base_peak_bytes: Most device memory in use during a whole request, weights included, base
            model; None on a CPU, where a process cannot tell its own buffers from freed ones.
        umim_peak_bytes: The same for UMIM.
    """

    phase: Phase
    rules: RuleKind
    asked_reduction: float | None
    prompt_tokens: int
    new_tokens: int
    batch_size: int
    token_reduction: float
    base_seconds: float
    umim_seconds: float
    base_tokens_per_s: float
    umim_tokens_per_s: float
    speedup: float
    speedup_low: float
    speedup_high: float
    bound: float
    pairs: int
    base_flops_per_s: float
    umim_flops_per_s: float
    base_kv_bytes: int
    umim_kv_bytes: int
    base_peak_bytes: int | None
    umim_peak_bytes: int | None

    @property
    def pays(self) -> bool:
        """Whether UMIM was faster, its lower quartile included."""
        return self.speedup_low > 1.0

    @property
    def label(self) -> str:
        """The rules for people, such as ``natural`` or ``pairs 25 %``."""
        asked = self.asked_reduction
        return self.rules if asked is None else f"pairs {100 * asked:.3g} %"

    def as_dict(self) -> dict[str, str | int | float | None]:
        """Return the fields by name."""
        return asdict(self)
