"""LLMLingua and Selective Context against the model's own logits, without a cache."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from support.reduced_texts import WORDS, given, ids_of, word_backbone
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.lexical_units import sentences
from umim_core.baselines.llmlingua import CompressedPrefix, LLMLingua
from umim_core.baselines.methods import Ints, reduce_tokens
from umim_core.baselines.selective_context import SelectiveContext, self_information
from umim_core.errors import ConfigError


@torch.no_grad()
def surprise_after(prefix: list[int], segment: list[int], backbone: Backbone) -> list[float]:
    """Minus log p of a segment's tokens after a prefix, from the logits of the whole model."""
    row = torch.tensor([prefix + segment])
    scores = backbone.model(input_ids=row).logits[0].log_softmax(-1)
    places = range(len(prefix), row.shape[1])
    return [
        -float(scores[t - 1, row[0, t]]) if t else math.log(backbone.vocab_size) for t in places
    ]


def test_segments_are_scored_after_what_was_kept_of_those_before(
    backbone: Backbone, rng: np.random.Generator
) -> None:
    ids = rng.integers(1, 32, 12)
    kept: list[int] = []
    for start, share in ((0, 2), (4, 3), (8, 3)):  # 2.67, 5.33 and 8 so far, rounded down
        segment = ids[start : start + 4].tolist()
        scores = surprise_after(ids[kept].tolist(), segment, backbone)
        chosen = sorted(range(4), key=lambda t: -scores[t])[:share]
        kept += sorted(start + t for t in chosen)
    assert reduce_tokens(LLMLingua(backbone, segment=4), given(ids), 8).kept.tolist() == kept


@pytest.mark.parametrize("options", [{"segment": 0}, {"granularity": 0.5}])
def test_a_segment_and_a_granularity_below_one_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="segment and granularity of LLMLingua must be at least"):
        LLMLingua(word_backbone("llama"), **options)


def test_a_prefix_beyond_the_positions_keeps_its_last_half(
    backbone: Backbone, rng: np.random.Generator
) -> None:
    ids = rng.integers(1, 32, 80)
    prefix = CompressedPrefix(backbone)
    prefix.append(ids[:30])
    prefix.append(ids[30:60])
    expected = surprise_after(ids[28:60].tolist(), ids[60:].tolist(), backbone)
    assert prefix.score(ids[60:]).tolist() == pytest.approx(expected, abs=1e-4)


def test_the_passage_of_the_least_perplexity_goes_first() -> None:
    backbone, blank = word_backbone("llama"), len(WORDS) - 1
    ids = np.array([3, 4, 5, 6, 7, blank, 8, 9, 3, 4, blank, 5, 6, 7, 8, 9, 3, 4], dtype=np.int64)
    parts = [range(6), range(6, 11), range(11, 18)]
    scores = [self_information(ids[list(part)], backbone).mean() for part in parts]
    [last] = sorted(range(3), key=lambda k: scores[k])[:1]
    kept = reduce_tokens(LLMLingua(backbone), given(ids), 4).kept.tolist()
    assert not set(kept) & set(parts[last])  # two others hold more than twice the budget


TEXT = "the cat sat in the mat. it ran and slept. dog 42"


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
    reducer = SelectiveContext(backbone, sentences)
    assert reduce_tokens(reducer, given(ids), 8).kept.tolist() == expected


def test_long_texts_are_scored_after_half_of_the_positions_at_least(
    backbone: Backbone, rng: np.random.Generator
) -> None:
    ids = rng.integers(1, 32, 90)
    found = self_information(ids, backbone)
    assert found[:64].tolist() == pytest.approx(surprise(ids[:64], backbone), abs=1e-4)
    assert found[64:].tolist() == pytest.approx(surprise(ids[32:], backbone)[32:], abs=1e-4)
