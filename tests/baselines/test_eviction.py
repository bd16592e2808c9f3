"""Cache policies at work: the full cache is the base model, dropped columns are really gone."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from umim_core.backbone.backbone import Backbone
from umim_core.baselines.eviction import score_evicted
from umim_core.baselines.full_cache import FullCache
from umim_core.baselines.methods import HeldColumns
from umim_core.errors import EvaluationError

CONTEXT = np.array([3, 1, 4, 1, 5, 9, 2, 6], dtype=np.int64)
ENDINGS = [np.array(ids, dtype=np.int64) for ids in ([5, 3, 5], [8], [9, 7])]


class Keeping:
    """Keep given columns of every head."""

    reads_attention: ClassVar[bool] = False
    rotation: ClassVar[None] = None

    def __init__(self, *columns: int) -> None:
        self.columns = columns

    def survivors(self, held: HeldColumns, budget: int) -> Tensor:
        return torch.tensor(self.columns).expand(held.keys.shape[0], -1)


@torch.no_grad()
def test_the_full_cache_equals_the_base_model_bit_for_bit(tiny_backbone: Backbone) -> None:
    scores, columns = score_evicted(CONTEXT, ENDINGS, tiny_backbone, lambda ids: FullCache(), 1)
    assert columns == len(CONTEXT)
    for ending, score in zip(ENDINGS, scores, strict=True):
        cache = DynamicCache()
        context = torch.from_numpy(CONTEXT)[None]
        first = tiny_backbone.model(context, past_key_values=cache, logits_to_keep=1)
        parts = [first.logits[0]]
        if len(ending) > 1:
            rest = tiny_backbone.model(torch.from_numpy(ending[:-1])[None], past_key_values=cache)
            parts.append(rest.logits[0])
        log_probs = torch.cat(parts).log_softmax(dim=-1)
        expected = log_probs.gather(1, torch.from_numpy(ending)[:, None])[:, 0]
        assert torch.equal(score.log_probs, expected)


@torch.no_grad()
def test_dropped_columns_are_those_that_a_mask_would_hide(tiny_backbone: Backbone) -> None:
    kept, ending = (0, 5, 7), ENDINGS[0]
    scores, columns = score_evicted(CONTEXT, [ending], tiny_backbone, lambda ids: Keeping(*kept), 3)
    assert columns == len(kept)
    ids = torch.from_numpy(np.concatenate([CONTEXT, ending[:-1]]))[None]
    seen = torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
    hidden = sorted(set(range(len(CONTEXT))) - set(kept))
    seen[len(CONTEXT) :, hidden] = False
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    states = tiny_backbone.hidden(tiny_backbone.embed(ids), mask)
    logits = tiny_backbone.head(states)[0, len(CONTEXT) - 1 :]
    expected = logits.log_softmax(dim=-1).gather(1, torch.from_numpy(ending)[:, None])[:, 0]
    torch.testing.assert_close(scores[0].log_probs, expected, atol=1e-5, rtol=1e-5)
    full, _ = score_evicted(CONTEXT, [ending], tiny_backbone, lambda ids: FullCache(), 3)
    assert torch.equal(scores[0].log_probs[0], full[0].log_probs[0])
    assert (scores[0].log_probs[1:] - full[0].log_probs[1:]).abs().min() > 1e-4


def test_a_policy_that_reads_attention_gets_the_weights_of_the_prefill(
    tiny_backbone: Backbone,
) -> None:
    shapes: list[tuple[int, ...]] = []

    class HeaviestHalf:
        """Keep half of the columns of every head: those that were looked at most."""

        reads_attention: ClassVar[bool] = True
        rotation: ClassVar[None] = None

        def survivors(self, held: HeldColumns, budget: int) -> Tensor:
            assert held.attention is not None
            torch.testing.assert_close(
                held.attention.sum(dim=-1), torch.ones(held.attention.shape[:2])
            )
            shapes.append(tuple(held.attention.shape))
            heads, columns = held.keys.shape[:2]
            looked_at = held.attention.sum(dim=1).view(heads, -1, columns).sum(dim=1)
            return looked_at.topk(budget, dim=-1).indices.sort(dim=-1).values

    before = tiny_backbone.model.config._attn_implementation
    _, columns = score_evicted(CONTEXT, ENDINGS, tiny_backbone, lambda ids: HeaviestHalf(), 4)
    assert columns == 4
    assert shapes == [(4, len(CONTEXT), len(CONTEXT))] * 2
    assert tiny_backbone.model.config._attn_implementation == before


@pytest.mark.parametrize("columns", [(), (2, 1), (0, 0), (-1, 2), (0, 8)])
def test_a_policy_that_breaks_its_protocol_is_refused(
    columns: tuple[int, ...], tiny_llama: Backbone
) -> None:
    with pytest.raises(EvaluationError, match="a cache policy must keep columns below 8"):
        score_evicted(CONTEXT, ENDINGS, tiny_llama, lambda ids: Keeping(*columns), 2)


def test_a_text_beyond_the_backbones_positions_is_refused(tiny_llama: Backbone) -> None:
    context = np.ones(64, dtype=np.int64)
    with pytest.raises(EvaluationError, match="64 positions"):
        score_evicted(context, [np.array([1, 2])], tiny_llama, lambda ids: FullCache(), 1)
