"""Every cache policy with a budget, on Llama- and GPT-2-like backbones, against the full cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.tiny_models import random_backbone
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.eviction import PolicyCache, score_evicted
from umim_core.baselines.full_cache import FullCache
from umim_core.baselines.methods import BASELINES, CachePolicy, EvictedColumns
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

MATCHER = Matcher(RuleSet.from_spans([(1, 2), (3, 4, 5)]))
CONTEXT = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], dtype=np.int64)
ENDINGS = [np.array(ids, dtype=np.int64) for ids in ([5, 8, 9, 7], [9, 3])]
NAMES = ("h2o",)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def backbone(request: pytest.FixtureRequest) -> Backbone:
    return random_backbone(request.param, torch.float64)


def new_policy(name: str, backbone: Backbone) -> CachePolicy:
    method = BASELINES.find(name)(backbone, MATCHER)
    assert isinstance(method, EvictedColumns)
    return method.new_policy(CONTEXT)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_cache_has_the_budget_after_every_forward(name: str, backbone: Backbone) -> None:
    for budget in (1, 2, 5, 9, 10, 12):
        cache = PolicyCache(backbone, new_policy(name, backbone))
        cache.read(torch.from_numpy(CONTEXT), budget)
        assert (cache.columns, cache.tokens) == (min(budget, 10), 10)
        for step, token in enumerate(ENDINGS[0], 1):  # a budget that grows by half a column
            held, allowed = cache.columns, budget + step // 2
            cache.read(torch.tensor([token]), allowed)
            assert (cache.columns, cache.tokens) == (min(allowed, held + 1), 10 + step)


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_of_the_whole_context_is_the_base_model(name: str, backbone: Backbone) -> None:
    base, _ = score_evicted(CONTEXT, ENDINGS, backbone, lambda ids: FullCache(), 1)
    for budget in (len(CONTEXT), 99):
        found, columns = score_evicted(
            CONTEXT, ENDINGS, backbone, lambda ids: new_policy(name, backbone), budget
        )
        assert columns == len(CONTEXT)
        for score, expected in zip(found, base, strict=True):
            torch.testing.assert_close(score.log_probs, expected.log_probs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_smaller_budget_changes_what_follows_the_first_token(
    name: str, backbone: Backbone
) -> None:
    full, part = (
        score_evicted(CONTEXT, ENDINGS, backbone, lambda ids: new_policy(name, backbone), budget)[0]
        for budget in (10, 5)
    )
    for score, whole in zip(part, full, strict=True):
        torch.testing.assert_close(score.log_probs[0], whole.log_probs[0])
        assert (score.log_probs[1:] - whole.log_probs[1:]).abs().min() > 1e-4
