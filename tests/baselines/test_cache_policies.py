"""Cache policies, span eviction among them, on small backbones, against the full cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from support.tiny_models import random_backbone
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.evicted_spans import evicted_spans
from umim_core.baselines.eviction import PolicyCache, score_evicted
from umim_core.baselines.full_cache import FullCache
from umim_core.baselines.methods import CachePolicy, EvictedColumns, Ints
from umim_core.baselines.registry import BASELINES, find_baseline
from umim_core.merging.likelihood import TokenScores
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

MATCHER = Matcher(RuleSet.from_spans([(1, 2), (3, 4, 5)]))
CONTEXT = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], dtype=np.int64)
ENDINGS = [np.array(ids, dtype=np.int64) for ids in ([5, 8, 9, 7], [9, 3])]
CASES = (
    ("h2o", "llama"),
    ("h2o", "gpt2"),
    ("h2o-masked-prompt", "llama"),  # generates as h2o does
    ("h2o-masked-prompt", "gpt2"),
    ("streaming-llm", "llama"),  # learned positions are refused: test_streaming_llm.py
    ("streaming-llm-kept-positions", "llama"),
    ("streaming-llm-kept-positions", "gpt2"),
)


@dataclass(frozen=True)
class Case:
    """A method on a backbone."""

    backbone: Backbone
    new_policy: Callable[[Ints], CachePolicy]

    def scores(self, budget: int) -> tuple[list[TokenScores], int]:
        return score_evicted(CONTEXT, ENDINGS, self.backbone, self.new_policy, budget)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> Case:
    name, family = request.param
    backbone = random_backbone(family, torch.float64)
    method = find_baseline(name).make(backbone, MATCHER)
    assert isinstance(method, EvictedColumns)
    return Case(backbone, method.new_policy)


@torch.no_grad()
def test_the_cache_has_the_budget_after_every_forward(case: Case) -> None:
    for budget in (1, 2, 5, 9, 10, 12):
        cache = PolicyCache(case.backbone, case.new_policy(CONTEXT))
        cache.read(torch.from_numpy(CONTEXT), budget)
        assert (cache.columns, cache.tokens) == (min(budget, 10), 10)
        for step, token in enumerate(ENDINGS[0], 1):  # a budget that grows by half a column
            held, allowed = cache.columns, budget + step // 2
            cache.read(torch.tensor([token]), allowed)
            assert (cache.columns, cache.tokens) == (min(allowed, held + 1), 10 + step)


def test_a_budget_of_the_whole_context_is_the_base_model(case: Case) -> None:
    """Bit for bit where no attention weights are read: those come from eager attention."""
    most = 1e-6 if case.new_policy(CONTEXT).reads_attention else 0.0
    base, _ = score_evicted(CONTEXT, ENDINGS, case.backbone, lambda ids: FullCache(), 1)
    for budget in (len(CONTEXT), 99):
        found, columns = case.scores(budget)
        assert columns == len(CONTEXT)
        for score, expected in zip(found, base, strict=True):
            torch.testing.assert_close(score.log_probs, expected.log_probs, atol=most, rtol=0)


def test_every_policy_with_a_budget_is_in_the_matrix() -> None:
    policies = {name for name, baseline in BASELINES.items() if baseline.side == "cache"}
    unbound = {name for name in policies if name == "full-cache" or "span-eviction" in name}
    assert policies - unbound == {name for name, _ in CASES}


MERGING = np.array([1, 2, 9, 3, 4, 5, 7, 1, 2], dtype=np.int64)  # 9 tokens, 5 units


ENDING = np.array([6, 8, 3], dtype=np.int64)


@pytest.mark.parametrize(("age", "hidden"), [(0, [3, 4, 7]), (3, [3, 4]), (4, [])])
@torch.no_grad()
def test_columns_of_old_spans_are_gone_after_the_context(
    age: int, hidden: list[int], tiny_llama: Backbone
) -> None:
    new_policy = evicted_spans(MATCHER, age).new_policy
    [scores], columns = score_evicted(MERGING, [ENDING], tiny_llama, new_policy, 5)
    assert columns == len(MERGING) - len(hidden)
    ids = torch.from_numpy(np.concatenate([MERGING, ENDING[:-1]]))[None]
    seen = torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
    seen[len(MERGING) :, hidden] = False
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    logits = tiny_llama.head(tiny_llama.hidden(tiny_llama.embed(ids), mask))
    log_probs = logits[0, len(MERGING) - 1 :].log_softmax(dim=-1)
    expected = log_probs.gather(1, torch.from_numpy(ENDING)[:, None])[:, 0]
    torch.testing.assert_close(scores.log_probs, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("age", [0, 16, 64])
def test_every_age_has_a_name(age: int, tiny_llama: Backbone) -> None:
    method = find_baseline(f"span-eviction-{age}").make(tiny_llama, MATCHER)
    assert isinstance(method, EvictedColumns)
    assert method.age == age
