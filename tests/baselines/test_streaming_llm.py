from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from support.tiny_models import random_backbone
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.key_rotation import key_rotation
from umim_core.baselines.eviction import PolicyCache
from umim_core.baselines.methods import HeldColumns
from umim_core.baselines.registry import find_baseline
from umim_core.baselines.streaming_llm import SinksAndNewest
from umim_core.errors import BackboneError
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 8, 7])


@pytest.fixture(scope="module")
def llama() -> Backbone:
    return random_backbone("llama", torch.float64)


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (1, [9]),
        (2, [0, 9]),
        (4, [0, 1, 2, 9]),
        (7, [0, 1, 2, 3, 7, 8, 9]),
        (9, [0, 1, 2, 3, 5, 6, 7, 8, 9]),
        (10, list(range(10))),
        (99, list(range(10))),
    ],
)
def test_four_sinks_and_the_newest_columns_stay(budget: int, kept: list[int]) -> None:
    states = torch.zeros(2, 10, 4)
    held = HeldColumns(0, states, states, torch.arange(10).expand(2, -1), None)
    assert SinksAndNewest(None).survivors(held, budget).tolist() == [kept, kept]


class Watched(SinksAndNewest):
    """StreamingLLM that remembers the first layer's keys and tokens as a forward found them."""

    keys: Tensor
    tokens: list[int]

    def survivors(self, held: HeldColumns, budget: int) -> Tensor:
        if held.layer == 0:
            self.keys, self.tokens = held.keys[:, :-1], held.tokens[0, :-1].tolist()
        return super().survivors(held, budget)


def first_keys(backbone: Backbone, ids: Tensor, positions: Tensor) -> Tensor:
    """Keys of the first layer [H, L, D] in a forward of its own."""
    cache = DynamicCache()
    backbone.model(ids[None], position_ids=positions[None], past_key_values=cache)
    keys = cache.layers[0].keys
    assert keys is not None
    return keys[0]


@pytest.mark.parametrize("rotates", [True, False])
@torch.no_grad()
def test_what_stays_has_the_keys_of_its_positions_after_every_step(
    rotates: bool, llama: Backbone
) -> None:
    policy = Watched(key_rotation(llama) if rotates else None)
    cache = PolicyCache(llama, policy)
    cache.read(IDS[:9], 6)
    for read in range(9, len(IDS)):
        cache.read(IDS[read : read + 1], 6)
        assert policy.tokens == [0, 1, 2, 3, read - 2, read - 1]
        numbers = torch.tensor(policy.tokens)
        positions = torch.arange(6) if rotates else numbers
        expected = first_keys(llama, IDS[numbers], positions)
        torch.testing.assert_close(policy.keys, expected, atol=1e-6, rtol=1e-6)


def test_learned_positions_cannot_be_moved_and_may_be_kept() -> None:
    gpt2, matcher = random_backbone("gpt2"), Matcher(RuleSet.from_spans([(1, 2)]))
    with pytest.raises(BackboneError, match="leaves columns at their positions"):
        find_baseline("streaming-llm").make(gpt2, matcher)
    assert find_baseline("streaming-llm-kept-positions").make(gpt2, matcher).side == "cache"
