"""EHPC: the tokens that a few probed heads of an early layer look at the least are deleted.

A worked example, with 2 last queries, a kernel of 2 and a budget of 4 of 6::

    attention of the heads    .4  .1  .0  .2          of the last queries, summed over heads
    pooled                    .2  .25 .05 .1          with the token before; 0 before the text
    stay before all others                    4  5    the last queries' own tokens
    kept                      0   1           4  5

Source: Fei et al., "Efficient Prompt Compression with Evaluator Heads for Long-Context Transformer
Inference" (NeurIPS 2025). Differences: docs/baselines.md.

Shapes: T tokens, n of them scored, W last queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import avg_pool1d

from umim_core.backbone.backbone import Backbone
from umim_core.baselines.evaluator_heads import (
    QUERIES,
    EvaluatorHeads,
    LastQueries,
    known_evaluator_heads,
)
from umim_core.baselines.methods import BASELINES, Ints, ReducedTokens, Text
from umim_core.baselines.reduction import highest
from umim_core.errors import ConfigError
from umim_core.rules.matcher import Matcher

KERNEL: Final = 32
_KERNELS: Final = 8  # that fit into the scored tokens, at least


@dataclass(frozen=True)
class EHPC:
    """Keep the tokens that evaluator heads look at from the end of the text.

    Attributes:
        scorer: The language model; it has the tokenizer of the text.
        heads: Its evaluator heads. Layers behind theirs are not run.
        queries: Last tokens W whose attention counts.
        kernel: Tokens that a score is averaged over.

    Raises:
        ConfigError: If queries or kernel are below 1.
    """

    exact: ClassVar[bool] = True
    scorer: Backbone
    heads: EvaluatorHeads
    queries: int = QUERIES
    kernel: int = KERNEL

    def __post_init__(self) -> None:
        if min(self.queries, self.kernel) < 1:
            raise ConfigError(
                "queries and kernel of EHPC must be at least 1",
                (self.queries, self.kernel),
                "The paper has 16 and 32.",
            )

    @cached_property
    def reader(self) -> LastQueries:
        """The layers up to that of the heads."""
        return LastQueries(self.scorer, self.heads.layer + 1)

    def keep(self, text: Text, budget: int) -> Ints:
        """Return the indices [budget] of the tokens that stay; see ``TokenReducer``."""
        return highest(self.scores(text), text.protected, budget)

    def scores(self, text: Text) -> NDArray[np.float64]:
        """Return a score per token [T]; those of the last queries are above all, and rise.

        Last queries are at most half of the text. A text that does not fit the model's positions is
        read in parts, the last queries behind each.
        """
        queries = min(self.queries, len(text.ids) // 2)
        seen, asked = text.ids[:-queries], text.ids[-queries:]
        room = max(1, (self.scorer.max_positions or len(text.ids)) - queries)
        parts = [self._mass(seen[i : i + room], asked) for i in range(0, len(seen), room)]
        pooled = pool(np.concatenate(parts), min(self.kernel, max(1, len(seen) // _KERNELS)))
        above = len(self.heads.heads) + np.arange(1.0, queries + 1)
        return np.concatenate([pooled, above])

    def _mass(self, seen: Ints, asked: Ints) -> NDArray[np.float64]:
        """Return the attention of last queries [W] on what stands before [n], heads summed."""
        weights = self.reader.weights(np.concatenate([seen, asked]), len(asked))
        mine = weights[self.heads.layer, list(self.heads.heads), :, : len(seen)].double()
        return mine.mean(dim=1).sum(dim=0).cpu().numpy()


def pool(scores: NDArray[np.float64], kernel: int) -> NDArray[np.float64]:
    """Average scores [n] over a kernel around each; beyond both ends they count as 0.

    A kernel of k takes k // 2 tokens before, the token itself and those behind up to k.
    """
    row = torch.from_numpy(scores)[None]
    pooled = avg_pool1d(row, kernel, stride=1, padding=kernel // 2)[0, : len(scores)]
    return pooled.numpy()


@BASELINES.add("ehpc")
def ehpc(backbone: Backbone, matcher: Matcher) -> ReducedTokens:
    """Delete the tokens that a few probed heads of an early layer look at the least."""
    return ReducedTokens(EHPC(backbone, known_evaluator_heads(backbone)))
