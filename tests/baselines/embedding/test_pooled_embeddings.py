"""Mean, last and sum of embeddings against an independent computation, span by span."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from umim_core.backbone.backbone import Backbone
from umim_core.baselines.methods import BASELINES, MergedSpans
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean-embedding": lambda span: torch.stack(list(span)).mean(dim=0),
    "last-embedding": lambda span: span[-1],
    "sum-embedding": lambda span: torch.stack(list(span)).sum(dim=0),
}


@pytest.mark.parametrize("name", POOLS)
def test_pooled_spans_equal_an_independent_computation(name: str, tiny_backbone: Backbone) -> None:
    method = BASELINES.find(name)(tiny_backbone, Matcher(RuleSet.from_spans([(1, 2)])))
    assert isinstance(method, MergedSpans)
    ids, lengths = torch.tensor([[3, 4, 5, 6], [7, 7, 9, 9], [1, 2, 0, 0]]), [4, 3, 2]
    found = method.merger(tiny_backbone.embed(ids), torch.tensor(lengths))
    for row, length, value in zip(ids, lengths, found, strict=True):
        expected = POOLS[name](tiny_backbone.embedding_weight[row[:length]])
        torch.testing.assert_close(value, expected)


def test_the_rules_of_the_cell_cut_the_text(tiny_backbone: Backbone) -> None:
    matcher = Matcher(RuleSet.from_spans([(1, 2)]))
    method = BASELINES.find("mean-embedding")(tiny_backbone, matcher)
    assert isinstance(method, MergedSpans)
    assert method.segmenter is matcher
