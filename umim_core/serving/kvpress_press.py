"""Span eviction as a press of kvpress 0.5, so that its benchmarks can compare it.

A press shortens the KV cache of a context that was read whole. Of every span that a rule merges
this one keeps the last column, which has seen the others; see ``inference.row_eviction``::

    from kvpress import KVPressTextGenerationPipeline
    from umim_core.serving.kvpress_press import SpanEvictionPress

    press = SpanEvictionPress("rules")  # an entry of PRESS_REGISTRY in kvpress's evaluation
    pipeline(context, question=question, press=press)

kvpress 0.5 needs transformers below 5.3, so it has an environment of its own: this module needs of
UMIM only what ``pip install --no-deps umim`` brings, numba, pyarrow and pydantic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvpress import BasePress
from torch import Tensor, nn

from umim_core.errors import GenerationError
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet


@dataclass
class SpanEvictionPress(BasePress):  # type: ignore[misc]  # kvpress is not installed here
    """Keep the last column of every span, and the first of the text."""

    rules: str  # their directory; they are of the model's tokenizer

    def __post_init__(self) -> None:
        self._matcher = Matcher(RuleSet.load(Path(self.rules)))
        self._columns: Tensor | None = None

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        """Apply it to a causal language model of transformers until the block ends."""
        hook = model.base_model.register_forward_pre_hook(self._read, with_kwargs=True)
        try:
            with super().__call__(model):
                yield
        finally:
            hook.remove()

    def _read(self, module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Find the columns that stay; a press is not told which tokens it shortens."""
        ids = inputs[0] if inputs else options.get("input_ids")
        if ids is None or len(ids) != 1:
            raise GenerationError("spans are found in one row of ids", "none, or several rows")
        starts, lengths = self._matcher.segment(ids[0].cpu().numpy())
        self._columns = torch.from_numpy(np.union1d([0], starts + lengths - 1)).to(ids.device)

    def compress(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values [1, heads, kept columns, width] of all [1, heads, T, width]."""
        return keys[:, :, self._columns].contiguous(), values[:, :, self._columns].contiguous()
