"""H2O on cases computed by hand, and on a model against an account of its attention in lists."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.tiny_models import random_backbone
from umim_core.backbone.attention_masks import eager_attention
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.eviction import PolicyCache
from umim_core.baselines.h2o import HeavyHitters, heavy_hitter_mask
from umim_core.baselines.methods import HeldColumns

# The weights of one head over the tokens a b c d, as in the docstring of ``baselines.h2o``.
WEIGHTS = [[1, 0, 0, 0], [0.6, 0.4, 0, 0], [0.1, 0.5, 0.4, 0], [0.1, 0.2, 0.3, 0.4]]
CONTEXT = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])


def held(weights: list[list[list[float]]], heads: int = 1) -> HeldColumns:
    """The columns of a layer with so many key/value heads, given weights [A][W][L]."""
    attention = torch.tensor(weights)
    states = torch.zeros(heads, attention.shape[-1], 2)
    return HeldColumns(0, states, states, attention)


@pytest.mark.parametrize(
    ("budget", "kept"),
    [(1, [3]), (2, [0, 3]), (3, [0, 2, 3]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])],
)
def test_half_are_heavy_hitters_and_half_are_new(budget: int, kept: list[int]) -> None:
    assert HeavyHitters().survivors(held([WEIGHTS]), budget).tolist() == [kept]


def test_heads_choose_for_themselves_and_query_heads_of_a_group_together() -> None:
    b_twice = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]]
    mild = [[1, 0, 0, 0], [0.9, 0.1, 0, 0], [0.9, 0, 0.1, 0], [0.9, 0, 0, 0.1]]
    found = HeavyHitters().survivors(held([WEIGHTS, b_twice, WEIGHTS, mild], heads=2), 2)
    assert found.tolist() == [[1, 3], [0, 3]]  # b has 4.1 against 2.8 of a


class Recorded(HeavyHitters):
    """H2O that writes down the tokens whose columns stay in the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stayed: list[list[int]] = []
        self.read = 0  # tokens, by the first layer

    def survivors(self, held: HeldColumns, budget: int) -> Tensor:
        kept = super().survivors(held, budget)
        if held.layer == 0:
            before = self.stayed or [[]] * len(kept)
            new = range(self.read, self.read + held.keys.shape[1] - len(before[0]))
            tokens = torch.tensor([[*row, *new] for row in before])
            self.stayed, self.read = tokens.gather(1, kept).tolist(), new.stop
        return kept


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def backbone(request: pytest.FixtureRequest) -> Backbone:
    return random_backbone(request.param, torch.float64)


@torch.no_grad()
def test_the_first_layer_keeps_what_an_account_in_lists_keeps(backbone: Backbone) -> None:
    """The first layer's queries and keys do not depend on what was dropped elsewhere."""
    budget, prompt = 5, 6
    with eager_attention(backbone.model):
        weights = backbone.model(CONTEXT[None], output_attentions=True).attentions[0][0].numpy()
    policy = Recorded()
    cache = PolicyCache(backbone, policy)
    cache.read(CONTEXT[:prompt], budget)
    heads = len(policy.stayed)
    group = len(weights) // heads
    accounts: list[dict[int, float]] = [{} for _ in range(heads)]
    for end in range(prompt, len(CONTEXT) + 1):
        for head, scores in enumerate(accounts):
            for query in range(prompt) if end == prompt else [end - 1]:
                scores[query] = 0.0
                for of_query in weights[head * group : (head + 1) * group]:
                    total = sum(of_query[query][column] for column in scores)
                    for column in scores:  # what is left of the softmax without dropped columns
                        scores[column] += of_query[query][column] / total
            recent = sorted(scores)[-3:]
            older = sorted(set(scores) - set(recent), key=lambda column: -scores[column])
            accounts[head] = {c: scores[c] for c in sorted([*older[:2], *recent])}
        assert policy.stayed == [list(scores) for scores in accounts]
        if end < len(CONTEXT):
            cache.read(CONTEXT[end : end + 1], budget)
    assert any(held != list(range(5, 10)) for held in policy.stayed)


def seen_by(weights: list[list[float]], heavy: int, newest: int) -> list[set[int]]:
    """Columns that each query of one head sees, as H2O's code for lm-eval has it, in lists."""
    tokens, scores, found = len(weights), [0.0] * len(weights), []
    for query in range(tokens):
        if query < heavy:
            hitters = set(range(query + 1))
        else:
            best = sorted(range(tokens), key=lambda column: -scores[column])[: heavy - 1]
            hitters = {*best, query}
        scores = [score + weight for score, weight in zip(scores, weights[query], strict=True)]
        if query >= heavy:
            scores = [score if column in hitters else 0.0 for column, score in enumerate(scores)]
        found.append(
            {c for c in hitters if c <= query} | {*range(max(0, query - newest), query + 1)}
        )
    return found


@pytest.mark.parametrize(("heavy", "newest"), [(0, 2), (1, 1), (3, 0), (4, 2)])
def test_masked_queries_see_hitters_and_the_newest(heavy: int, newest: int) -> None:
    torch.manual_seed(5)
    logits = torch.randn(2, 12, 12).masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf)
    weights = logits.softmax(-1)
    mask = heavy_hitter_mask(weights, heavy, newest)
    for head in range(2):
        if heavy:
            expected = seen_by(weights[head].tolist(), heavy, newest)
        else:
            expected = [set(range(max(0, query - newest), query + 1)) for query in range(12)]
        assert [set(row.nonzero().view(-1).tolist()) for row in mask[head]] == expected
