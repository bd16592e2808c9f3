"""Early Attempt One of UMIM's paper: neighbours whose embeddings are alike become their mean.

Pairs of neighbouring tokens above a threshold of cosine similarity are joined. The threshold is
that of the text: the most similar pairs are joined until as many units are left as the rules leave.
Pairs of four tokens, and a budget of 2::

    tokens     a     b     c     d
    cosines      .9    .1    .4
    joined     [a b]       [c d]        .9 and .4; each unit has the mean of its embeddings

A pair that would make a unit of more than four tokens is passed over, and the next one is taken.
Source: the paper's account of earlier attempts, which merges by similarity and trains nothing.

Shapes: T tokens, d embedding size.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity

from umim_core.backbone.backbone import Backbone
from umim_core.baselines.embedding.whole_texts import WholeTextSegmenter
from umim_core.baselines.methods import BASELINES, Ints, MergedSpans
from umim_core.merging.forms.span_ops import inside_spans, last_embedding
from umim_core.merging.module import MAX_SPAN
from umim_core.rules.matcher import Matcher

_DIGITS: Final = 9  # of a cosine: the same pair has the same one at every place


def sum_embedding(spans: Tensor, lengths: Tensor) -> Tensor:
    """Add the embeddings of spans [M, N, d] with lengths [M]: [M, d]."""
    outside = ~inside_spans(lengths, spans.shape[1])
    return spans.masked_fill(outside[..., None], 0.0).sum(dim=1)


def mean_embedding(spans: Tensor, lengths: Tensor) -> Tensor:
    """Average the embeddings of spans [M, N, d] with lengths [M]: [M, d]."""
    return sum_embedding(spans, lengths) / lengths[:, None]


@BASELINES.add("mean-embedding")
def mean(backbone: Backbone, matcher: Matcher) -> MergedSpans:
    """Replace each span that the rules match by the mean of its token embeddings."""
    return MergedSpans(matcher, mean_embedding)


@BASELINES.add("last-embedding")
def last(backbone: Backbone, matcher: Matcher) -> MergedSpans:
    """Replace each span that the rules match by its last token embedding."""
    return MergedSpans(matcher, last_embedding)


@BASELINES.add("sum-embedding")
def total(backbone: Backbone, matcher: Matcher) -> MergedSpans:
    """Replace each span that the rules match by the sum of its token embeddings."""
    return MergedSpans(matcher, sum_embedding)


class SimilarNeighbours(WholeTextSegmenter):
    """Join the neighbours of the highest cosine similarity, of equal ones the first."""

    def lengths(self, ids: Ints, of_rules: Ints) -> Ints:
        """Return the lengths of units of ids [T], as many as those [S] of the rules.

        More are left where no two neighbours fit into one any more, which cannot happen while there
        are more than (2 T + 3) / 5. Nothing counts them as a shortfall.
        """
        first, last = np.arange(len(ids)), np.arange(len(ids))  # of the unit, at its two ends
        joined = np.zeros(len(ids), dtype=bool)  # to the token before
        left = len(ids) - len(of_rules)
        for pair in np.argsort(-self._cosines(ids), kind="stable").tolist():
            start, end = first[pair], last[pair + 1]
            if not left:
                break
            if end - start < MAX_SPAN:
                joined[pair + 1], last[start], first[end] = True, end, start
                left -= 1
        return np.diff(np.flatnonzero(np.append(~joined, True)))

    @torch.no_grad()
    def _cosines(self, ids: Ints) -> NDArray[np.float64]:
        """Return the cosine similarity of each token and the next one [T - 1] (float64)."""
        tokens = self.backbone.embed(torch.from_numpy(ids).to(self.backbone.device)).cpu().double()
        cosines = cosine_similarity(tokens[:-1], tokens[1:], dim=-1).numpy()
        return cosines.round(_DIGITS)


@BASELINES.add("similar-neighbours")
def similar_neighbours(backbone: Backbone, matcher: Matcher) -> MergedSpans:
    """Replace neighbouring tokens of the most similar embeddings by their mean."""
    return MergedSpans(SimilarNeighbours(backbone, matcher), mean_embedding)
