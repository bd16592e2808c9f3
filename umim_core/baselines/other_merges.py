"""Span mergers other than UMIM: other embeddings of the rules' spans, and other spans.

Random spans show what the choice of spans is worth: units as long as those of the rules, merged by
the same module. Of the units that the rules leave of a text the order is drawn, by its ids::

    rules     [the cat] [sat] [on the mat] [.]       lengths 2 1 3 1
    random    [the] [cat sat on] [the] [mat .]       lengths 1 3 1 2

Similar neighbours are Early Attempt One of UMIM's paper, which trains nothing: neighbours whose
embeddings are alike become their mean. The most similar pairs are joined until as many units are
left as the rules leave. Pairs of four tokens, and a budget of 2::

    tokens     a     b     c     d
    cosines      .9    .1    .4
    joined     [a b]       [c d]        .9 and .4; each unit has the mean of its embeddings

A pair that would make a unit longer than rules may be (four tokens) is passed over, and the next
one is taken.

Shapes: M spans, N tokens of the longest, T tokens, d embedding size.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity

from umim_core.backbone.backbone import Backbone
from umim_core.merging.packing import Segmentation, inside_spans
from umim_core.rules.matcher import Matcher
from umim_core.text.token_ids import Ints


class WholeTextSegmenter(ABC):
    """Cut texts by something else than rules, at the token reduction of the rules.

    Where a unit ends may depend on the whole text, so a beginning need not have the units that it
    has in the text. Units with a special token, such as a BOS or the mark of a turn, are those of
    the rules, and each stretch between them is cut as a text of its own.
    """

    def __init__(self, backbone: Backbone, matcher: Matcher) -> None:
        self.backbone, self.matcher = backbone, matcher

    def segment(self, ids: NDArray[np.integer]) -> Segmentation:
        starts, of_rules = self.matcher.segment(ids)
        special = np.isin(ids, list(self.backbone.special_ids))
        special_units = np.flatnonzero(np.logical_or.reduceat(special, starts))
        text, borders = np.asarray(ids, dtype=np.int64), np.append(starts, len(ids))
        lengths_of_parts, first = [of_rules[:0]], 0
        for unit in (*special_units.tolist(), len(of_rules)):
            if first < unit:
                stretch = text[borders[first] : borders[unit]]
                lengths_of_parts.append(self.lengths(stretch, of_rules[first:unit]))
            lengths_of_parts.append(of_rules[unit : unit + 1])
            first = unit + 1
        lengths = np.concatenate(lengths_of_parts)
        return np.cumsum(lengths) - lengths, lengths

    @abstractmethod
    def lengths(self, ids: Ints, of_rules: Ints) -> Ints:
        """Return the lengths [S'] of the units of ids [T], given those [S] that rules leave.

        None of the ids is of a special token, and T is at least 1.
        """


class RandomSpans(WholeTextSegmenter):
    def lengths(self, ids: Ints, of_rules: Ints) -> Ints:
        """Return the lengths [S] of the rules in an order that the ids [T] draw."""
        seed = hashlib.sha256(ids.tobytes()).digest()
        return np.random.default_rng(list(seed)).permutation(of_rules)


_DIGITS: Final = 9  # of a cosine: the same pair has the same one at every place


def sum_embedding(spans: Tensor, lengths: Tensor) -> Tensor:
    outside = ~inside_spans(lengths, spans.shape[1])
    return spans.masked_fill(outside[..., None], 0.0).sum(dim=1)


def mean_embedding(spans: Tensor, lengths: Tensor) -> Tensor:
    return sum_embedding(spans, lengths) / lengths[:, None]


class SimilarNeighbours(WholeTextSegmenter):
    """Join the neighbours of the highest cosine similarity, of equal ones the first."""

    def lengths(self, ids: Ints, of_rules: Ints) -> Ints:
        """Return the lengths of units of ids [T], as many as those [S] of the rules.

        More are left where no two neighbours fit into one any more, which cannot happen while there
        are more than (2 T + 3) / 5, of rules of up to four tokens. Nothing counts them as a
        shortfall.
        """
        first, last = np.arange(len(ids)), np.arange(len(ids))  # of the unit, at its two ends
        joined = np.zeros(len(ids), dtype=bool)  # to the token before
        to_join = len(ids) - len(of_rules)
        for pair in np.argsort(-self._cosines(ids), kind="stable").tolist():
            start, end = first[pair], last[pair + 1]
            if not to_join:
                break
            if end - start < self.matcher.rules.longest:
                joined[pair + 1], last[start], first[end] = True, end, start
                to_join -= 1
        return np.diff(np.flatnonzero(np.append(~joined, True)))

    @torch.no_grad()
    def _cosines(self, ids: Ints) -> NDArray[np.float64]:
        """Return the cosine similarity of each token and the next one [T - 1] (float64)."""
        tokens = self.backbone.embed(torch.from_numpy(ids).to(self.backbone.device)).cpu().double()
        cosines = cosine_similarity(tokens[:-1], tokens[1:], dim=-1).numpy()
        return cosines.round(_DIGITS)
