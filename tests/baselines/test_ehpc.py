"""EHPC against weights of the whole model, and heads found by a probe against given masses."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from support.reduced_texts import FAMILIES, given, word_backbone
from support.tiny_models import random_backbone
from umim_core.backbone.attention_masks import eager_attention
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.baselines.ehpc import (
    DEPTHS,
    EHPC,
    EvaluatorHeads,
    Probe,
    best_heads,
    find_evaluator_heads,
    needle_mass,
    probes,
)
from umim_core.baselines.methods import Ints, reduce_tokens
from umim_core.errors import BackboneError

HEADS = EvaluatorHeads(0, (1, 3))


@pytest.fixture(scope="module", params=(*FAMILIES, "qwen2"))  # which lists types of its layers
def backbone(request: pytest.FixtureRequest) -> Backbone:
    """Each family in turn."""
    return word_backbone(request.param)


@torch.no_grad()
def attention(row: Ints, backbone: Backbone) -> list[torch.Tensor]:
    """Weights [A, T, T] of every layer, from one eager forward of the whole model."""
    with eager_attention(backbone.model):
        out = backbone.model(torch.from_numpy(row)[None], output_attentions=True)
    return [weights[0].double() for weights in out.attentions]


@pytest.mark.parametrize("heads", [HEADS, EvaluatorHeads(1, (0, 2))])
def test_tokens_that_the_heads_look_at_the_least_go(
    heads: EvaluatorHeads, backbone: Backbone, rng: np.random.Generator
) -> None:
    ids = rng.integers(1, 32, 43)
    seen = attention(ids, backbone)[heads.layer]
    mass = sum(seen[head, -5:, :38].mean(dim=0) for head in heads.heads).numpy()
    scores = [sum(mass[max(0, t - 2) : t + 2]) / 4 for t in range(38)]  # kernel 4
    order = [42, 41, 40, 39, 38, *sorted(range(38), key=lambda t: -scores[t])]  # 5 queries
    reducer = EHPC(backbone, heads, queries=5, kernel=4)
    for budget in (1, 2, 15, 30):
        assert reduce_tokens(reducer, given(ids), budget).tolist() == sorted(order[:budget])


def test_the_layer_and_its_best_quarter_of_heads_are_found_by_mass() -> None:
    mass = np.array([[0.9, 0, 0, 0, 0, 0, 0, 0], [0.1, 0.2, 0.1, 0.3, 0.1, 0.1, 0.2, 0.1]])
    assert best_heads(mass) == EvaluatorHeads(1, (1, 3))
    assert best_heads(mass[:, :3]) == EvaluatorHeads(0, (0,))


def test_probes_hold_their_needle_at_rising_depths_and_fit() -> None:
    tokenizer = load_tokenizer("umim-docs-llama")
    places, vocabulary = 512, len(tokenizer)
    reader = random_backbone(
        tokenizer=tokenizer, vocab_size=vocabulary, max_position_embeddings=places
    )
    texts = list(probes(reader))
    assert len(texts) == len(DEPTHS)
    assert all(0.9 * places < len(text.ids) <= places for text in texts)
    for text in texts:
        needle = reader.decode(text.ids[text.needle].tolist())
        assert (
            needle.startswith(" The ")
            and " locker opens with the code " in needle
            and needle[-1] == "."
        )
    shares = [text.needle.start / len(text.ids) for text in texts]
    assert all(early < late for early, late in pairwise(shares))


def test_the_mass_on_a_needle_is_that_of_the_whole_model(backbone: Backbone) -> None:
    """Two probes of other lengths; queries of the first are fewer than the 16 that are asked."""
    rng = np.random.default_rng(3)
    places = {9: slice(2, 5), 40: slice(7, 8)}
    texts = [Probe(rng.integers(1, 32, size), place) for size, place in places.items()]
    expected = np.zeros((2, 4))
    for text, queries in zip(texts, (9, 16), strict=True):
        for layer, weights in enumerate(attention(text.ids, backbone)):
            for query in range(len(text.ids) - queries, len(text.ids)):
                on_needle = weights[:, query, text.needle].sum(dim=-1).numpy()
                expected[layer] += on_needle / queries / len(texts)
    assert needle_mass(backbone, iter(texts)) == pytest.approx(expected, abs=1e-6)


def test_a_backbone_without_room_for_a_needle_and_its_question_is_refused() -> None:
    tokenizer = word_backbone("llama").require_tokenizer()
    least = 27  # words: 8 of the needle, 19 of the question
    tight = random_backbone(tokenizer=tokenizer, max_position_embeddings=least)
    assert all(len(text.ids) == least and text.needle.start == 0 for text in probes(tight))
    small = random_backbone(tokenizer=tokenizer, max_position_embeddings=least - 1)
    with pytest.raises(BackboneError, match=f"{least} tokens"):
        list(probes(small))


@pytest.mark.parametrize("family", (*FAMILIES, "qwen2"))
def test_the_early_layer_with_the_most_mass_is_found(family: str) -> None:
    """Of five layers the first three may be taken, and the fourth has more mass than they."""
    tokenizer = word_backbone(family).require_tokenizer()
    deep = random_backbone(family, seed=26, num_hidden_layers=5, tokenizer=tokenizer)
    mass = np.zeros((5, 4))
    for text in probes(deep):
        for layer, weights in enumerate(attention(text.ids, deep)):
            mass[layer] += weights[:, -16:, text.needle].sum(dim=-1).mean(dim=-1).numpy()
    assert int(mass.sum(axis=1).argmax()) == 3
    layer = int(mass[:3].sum(axis=1).argmax())
    assert layer == 2
    assert find_evaluator_heads(deep) == EvaluatorHeads(layer, (int(mass[layer].argmax()),))
