"""Roofline of a device: no measured figure may lie above it.

The paper's throughput table implies more FLOP/s than its GPU has; a benchmark that checks itself
against a ceiling cannot print such a row.

Symbols: P weights in the blocks' matrices, l layers, d width of all query heads, S units.

    forward FLOPs     2 P S + 2 l d S^2      (projections; causal scores and weighted sums)
    prefill bound     FLOPs(L) / FLOPs(r L)  = (1 + a) / (r + a r^2),  a = L l d / P
                      at merge depth k, k of l layers keep FLOPs(L)
    decode bound      (W + B KV(L)) / (W + B KV(r L))   bytes read per token
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from umim_core.backbone.shape import BackboneShape
from umim_core.errors import EvaluationError, require
from umim_core.merging.merged_model import MergedModel

# Where a device reaches its peak: a GPU needs large products to fill it, and caches must be too
# small for what is copied.
_SIZES: Final = {"cpu": (512, 1024), "cuda": (2048, 4096, 8192)}
_COPIED: Final = {"cpu": 256 << 20, "cuda": 4 << 30}  # bytes
_REPEATS: Final = 4


@dataclass(frozen=True)
class ForwardCost:
    """What a model's forwards cost, and the bounds that follow; some layers read raw tokens."""

    shape: BackboneShape
    weight_bytes: int
    raw_layers: int = 0

    @classmethod
    def of(cls, merged_model: MergedModel) -> ForwardCost:
        backbone = merged_model.backbone
        shape = BackboneShape.of_model(backbone.model)
        return cls(shape, backbone.head_weight.element_size(), merged_model.merge_depth)

    def columns(self, raw: Any, units: Any) -> Any:
        """Return what a layer holds on average: raw tokens below the depth, units above."""
        return units + (raw - units) * self.raw_layers / self.shape.layers

    def prefill_flops(self, units: float, raw: float) -> float:
        """Return the FLOPs that reading one row needs at least (last logits only)."""
        shape = self.shape
        read, merged = (
            2.0 * shape.block_weights * n + 2.0 * shape.layers * shape.query_width * n * n
            for n in (raw, units)
        )
        return float(self.columns(read, merged)) + 2.0 * shape.head_weights

    def decode_flops(self, units: float) -> float:
        attention = 4.0 * self.shape.layers * self.shape.query_width * units
        return 2.0 * (self.shape.block_weights + self.shape.head_weights) + attention

    def prefill_bound(self, raw: float, units: float) -> float:
        return self.prefill_flops(raw, raw) / self.prefill_flops(units, raw)

    def kv_bytes(self, units: float) -> float:
        return 2.0 * self.shape.layers * self.shape.kv_width * self.weight_bytes * units

    def step_bytes(self, columns: float, batch_size: int) -> float:
        """Return the bytes that a token of every row reads: all weights, and the rows' columns."""
        weights = (self.shape.block_weights + self.shape.head_weights) * self.weight_bytes
        return weights + batch_size * self.kv_bytes(columns)

    def decode_bound(self, raw: float, units: float, batch_size: int) -> float:
        merged = self.step_bytes(self.columns(raw, units), batch_size)
        return self.step_bytes(raw, batch_size) / merged


@dataclass(frozen=True)
class Roofline:
    """A ceiling of the device: FLOP/s of its best matrix product, or bytes it moves a second."""

    peak: float
    unit: str = "FLOP/s"

    def check(self, label: str, amount: float, seconds: float) -> float:
        """Return the rate of a measurement, or refuse it."""
        achieved = amount / seconds if seconds > 0 else math.inf
        rule = f"{label} must stay below the device's {self.peak:.3g} {self.unit}"
        value = f"{achieved:.3g} {self.unit}"
        remedy = "Measure on an idle machine; else the timing or the amount of work is wrong."
        require(achieved <= self.peak, EvaluationError, rule, value, remedy)
        return achieved


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def measure_peak(device: torch.device, dtype: torch.dtype) -> Roofline:
    best = 0.0
    for size in _SIZES[device.type]:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        best = max(best, 2.0 * size**3 / _least_seconds(partial(torch.mm, left, right), device))
    return Roofline(best)


def measure_bandwidth(device: torch.device) -> Roofline:
    """Measure the bytes that a copy reads and writes a second."""
    source = torch.ones(_COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _least_seconds(partial(target.copy_, source), device)
    return Roofline(2.0 * source.nbytes / seconds, "bytes/s")


def _least_seconds(run: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(_REPEATS):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
