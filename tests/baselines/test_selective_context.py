"""Selective Context against self-information computed from the model's own logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from support.reduced_texts import FAMILIES, given, ids_of, word_backbone
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.methods import Ints
from umim_core.baselines.reduction import reduce_tokens
from umim_core.baselines.selective_context import SelectiveContext
from umim_core.baselines.self_information import self_information

TEXT = "the cat sat in the mat. it ran and slept. dog 42"


@pytest.fixture(scope="module", params=FAMILIES)
def backbone(request: pytest.FixtureRequest) -> Backbone:
    """Each family in turn."""
    return word_backbone(request.param)


@torch.no_grad()
def surprise(ids: Ints, backbone: Backbone) -> list[float]:
    """Minus log p of every token, from the logits of the whole model."""
    scores = backbone.model(input_ids=torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
    later = [-float(scores[t - 1, ids[t]]) for t in range(1, len(ids))]
    return [math.log(backbone.vocab_size), *later]


def test_the_tokens_with_the_least_self_information_go(backbone: Backbone) -> None:
    ids = ids_of(TEXT)
    scores = surprise(ids, backbone)
    expected = sorted(sorted(range(len(ids)), key=lambda t: -scores[t])[:5])
    assert reduce_tokens(SelectiveContext(backbone), given(ids), 5).kept.tolist() == expected


def test_sentences_stay_by_the_sum_of_their_tokens_and_the_last_is_cut(backbone: Backbone) -> None:
    ids = ids_of(TEXT)
    scores, parts = surprise(ids, backbone), [range(6), range(6, 10), range(10, 12)]
    order = sorted(parts, key=lambda part: -sum(scores[t] for t in part))
    expected = sorted([t for part in order for t in part][:8])
    reducer = SelectiveContext(backbone, "sentence")
    assert reduce_tokens(reducer, given(ids), 8).kept.tolist() == expected


def test_long_texts_are_scored_after_half_of_the_positions_at_least(
    backbone: Backbone, rng: np.random.Generator
) -> None:
    ids = rng.integers(1, 32, 90)
    found = self_information(ids, backbone)
    assert found[:64].tolist() == pytest.approx(surprise(ids[:64], backbone), abs=1e-4)
    assert found[64:].tolist() == pytest.approx(surprise(ids[32:], backbone)[32:], abs=1e-4)
