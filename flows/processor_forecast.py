"""Forecast of distillation time on this machine's processor, from shapes and a measured rate."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from tasks.report.compare import cell_row
from umim_core.backbone.shape import local_shape
from umim_core.config.hardware import HardwareConfig
from umim_core.config.recipe import Recipe
from umim_core.distill.distill_cost import MFU
from umim_core.distill.distill_forecast import predict_distillation
from umim_core.distill.train_loop import planned_steps
from umim_core.errors import ConfigError
from umim_core.mining.costs import Prediction
from umim_core.progress_lines import duration

# Of the rate of large float32 products. On the reference machine (100-140 GFLOP/s) whole steps came
# to 134 GFLOP/s (embedded backbone, 8 x 512) and 93 (SmolLM2-135M, 4 x 512), both under bfloat16:
# what is not a product takes what the faster products save.
_SHARE: Final = 0.8
_LEAST_SECONDS: Final = 0.2  # of a step: thousands of small operations, whatever the sizes
_SIDE: Final = 1024
_PROBES: Final = 3


@dataclass(frozen=True)
class ProcessorPrediction:
    """Predicted cost of a distillation on this machine's processor.

    Attributes:
        step_seconds: Of one optimiser step.
        steps: Optimiser steps at most.
        gflops: Measured rate of large float32 products, 1e9 FLOP/s.
        token_reduction: As assumed.
    """

    step_seconds: float
    steps: int
    gflops: float
    token_reduction: float

    def line(self) -> str:
        """Return it for people."""
        return (
            f"about {self.step_seconds:.2g} s a step, {duration(self.steps * self.step_seconds)} "
            f"for {self.steps:,} steps at most, validation left out (assumed: token reduction "
            f"{self.token_reduction:.0%}, {_SHARE:.0%} of the {self.gflops:,.0f} GFLOP/s that "
            "large float32 products reach here now)"
        )


def predict_on_processor(
    recipe: Recipe, mining: Mapping[str, Prediction]
) -> list[tuple[str, ProcessorPrediction]]:
    """Predict the time of every cell's distillation; the rate is measured in a second.

    Args:
        recipe: What would be run.
        mining: Predictions by backbone; they tell the tokens of the corpus.

    Returns:
        One per cell whose backbone is on this machine and of a known family; nothing for GPUs.
    """
    if recipe.cluster.use_gpu:
        return []
    gflops, found = None, []
    for cell in recipe.cells:
        try:
            shape = local_shape(cell.backbone, cell.revision)
        except ConfigError:  # a family whose shape its configuration does not tell
            continue
        if shape is None:
            continue
        gflops = gflops or _measured_gflops()
        processor = HardwareConfig(
            name="processor",
            gpus=1,
            gpu_memory_gib=1.0,
            bf16_tflops=_SHARE / MFU * gflops / 1e3,
            memory_bandwidth_gbs=1e6,
        )
        told = mining.get(cell.backbone)
        tokens = recipe.corpus.train_tokens if told is None else told.tokens
        prediction = predict_distillation(
            shape,
            cell,
            rows=recipe.distill.batch_size,
            segment_length=recipe.segment_length,
            bf16=recipe.distill.bf16,
            strategy="ddp",
            hardware=processor,
            steps=(
                recipe.distill.max_steps
                if tokens is None
                else planned_steps(recipe.distill, max(1, tokens // recipe.segment_length))
            ),
        )
        found.append(
            (
                cell_row(cell).label,
                ProcessorPrediction(
                    max(_LEAST_SECONDS, prediction.step_seconds),
                    prediction.steps,
                    gflops,
                    processor.expected_token_reduction,
                ),
            )
        )
    return found


def _measured_gflops() -> float:
    left, right = (torch.ones(_SIDE, _SIDE) for _ in range(2))
    torch.mm(left, right)
    took = []
    for _ in range(_PROBES):
        began = time.perf_counter()
        torch.mm(left, right)
        took.append(time.perf_counter() - began)
    return 2.0 * _SIDE**3 / min(took) / 1e9
