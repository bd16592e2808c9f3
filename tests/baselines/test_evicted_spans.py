"""Span eviction as a cache policy: what stays of a context, and that registered names exist."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from umim_core.backbone.backbone import Backbone
from umim_core.baselines.evicted_spans import AGES, evicted_spans
from umim_core.baselines.eviction import score_evicted
from umim_core.baselines.methods import BASELINES, EvictedColumns
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

MATCHER = Matcher(RuleSet.from_spans([(1, 2), (3, 4, 5)]))
CONTEXT = np.array([1, 2, 9, 3, 4, 5, 7, 1, 2], dtype=np.int64)  # 9 tokens, 5 units
ENDING = np.array([6, 8, 3], dtype=np.int64)


@pytest.mark.parametrize(("age", "hidden"), [(0, [3, 4, 7]), (3, [3, 4]), (4, [])])
@torch.no_grad()
def test_columns_of_old_spans_are_gone_after_the_context(
    age: int, hidden: list[int], tiny_llama: Backbone
) -> None:
    new_policy = evicted_spans(MATCHER, age).new_policy
    [scores], columns = score_evicted(CONTEXT, [ENDING], tiny_llama, new_policy, 5)
    assert columns == len(CONTEXT) - len(hidden)
    ids = torch.from_numpy(np.concatenate([CONTEXT, ENDING[:-1]]))[None]
    seen = torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
    seen[len(CONTEXT) :, hidden] = False
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    logits = tiny_llama.head(tiny_llama.hidden(tiny_llama.embed(ids), mask))
    log_probs = logits[0, len(CONTEXT) - 1 :].log_softmax(dim=-1)
    expected = log_probs.gather(1, torch.from_numpy(ENDING)[:, None])[:, 0]
    torch.testing.assert_close(scores.log_probs, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("age", AGES)
def test_every_age_has_a_name(age: int, tiny_llama: Backbone) -> None:
    method = BASELINES.find(f"span-eviction-{age}")(tiny_llama, MATCHER)
    assert isinstance(method, EvictedColumns)
    assert method.age == age
