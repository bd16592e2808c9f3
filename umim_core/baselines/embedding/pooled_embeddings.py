"""Mean, last and sum of a span's token embeddings: merging at the same rules without training.

Shapes: M spans, N tokens in the longest span, d embedding size. With e1 e2 in a span::

    mean (e1 + e2) / 2        last e2        sum e1 + e2
"""

from __future__ import annotations

from torch import Tensor

from umim_core.backbone.backbone import Backbone
from umim_core.baselines.methods import BASELINES, MergedSpans
from umim_core.merging.forms.anchors import last_embedding
from umim_core.merging.forms.merge_form import inside_spans
from umim_core.rules.matcher import Matcher


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
