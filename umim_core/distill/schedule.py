"""Learning-rate schedule: linear warm-up over the first part of the steps, then linear decay."""

from __future__ import annotations

import math

from umim_core.errors import ConfigError


def linear_warmup_decay(step: int, total_steps: int, warmup_fraction: float = 0.1) -> float:
    """Return the factor on the peak learning rate at a step.

    It rises from 1/w to 1 over the w = ceil(warmup_fraction * total_steps) first steps and falls
    linearly to 1 / (total_steps - w + 1) at the last one, so that no step is wasted at rate 0.

    Args:
        step: Step to be taken, counted from 0.
        total_steps: Planned steps.
        warmup_fraction: Share of warm-up steps, 0 <= f < 1.

    Raises:
        ConfigError: If the fraction is outside its bounds or there are no steps.

    Source: paper, "Optimization and Distributed Training" (10 % warm-up, linear decay).
    """
    if total_steps < 1 or not 0.0 <= warmup_fraction < 1.0:
        raise ConfigError(
            "a schedule needs at least one step and a warm-up fraction in [0, 1)",
            f"{total_steps} steps, fraction {warmup_fraction}",
            "Raise the steps or lower the fraction.",
        )
    warmup = math.ceil(warmup_fraction * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    return max(0.0, (total_steps - step) / (total_steps - warmup + 1))
