"""CPC against cosines computed sentence by sentence from the model's own hidden states."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.reduced_texts import FAMILIES, given, ids_of, word_backbone
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.cpc import CPC
from umim_core.baselines.methods import Ints
from umim_core.baselines.reduction import reduce_tokens

TEXT = "the cat sat in the mat. it ran and slept. the dog of the mat."
PARTS = [range(6), range(6, 10), range(10, 15)]
QUESTION = "the dog ran what?"


@pytest.fixture(scope="module", params=FAMILIES)
def encoder(request: pytest.FixtureRequest) -> Backbone:
    """Each family in turn."""
    return word_backbone(request.param)


@torch.no_grad()
def cosines(ids: Ints, question: Ints, encoder: Backbone) -> list[float]:
    """Cosine of each part of ``PARTS`` and the question, both read in one row."""
    row = torch.from_numpy(np.concatenate([question, ids]))[None]
    states = encoder.trunk(input_ids=row).last_hidden_state[0].numpy()
    asked, text = states[: len(question)].mean(0), states[len(question) :]
    means = [text[list(part)].mean(0) for part in PARTS]
    return [float(m @ asked / np.linalg.norm(m) / np.linalg.norm(asked)) for m in means]


@pytest.mark.parametrize("budget", [3, 8, 12])
def test_sentences_like_the_question_stay_and_the_last_is_trimmed(
    budget: int, encoder: Backbone
) -> None:
    ids = ids_of(TEXT)
    scores = cosines(ids, ids_of(QUESTION), encoder)
    order = sorted(range(3), key=lambda k: -scores[k])
    expected = sorted([t for k in order for t in PARTS[k]][:budget])
    found = reduce_tokens(CPC(encoder), given(ids, question=QUESTION), budget)
    assert found.kept.tolist() == expected


def test_without_a_question_the_last_sentence_is_one(encoder: Backbone) -> None:
    ids = ids_of(TEXT)
    asked = given(ids, question="the dog of the mat.")
    for budget in (3, 8, 12):
        unasked = reduce_tokens(CPC(encoder), given(ids), budget).kept.tolist()
        assert unasked == reduce_tokens(CPC(encoder), asked, budget).kept.tolist()


def test_the_question_decides(encoder: Backbone) -> None:
    ids, sentence_of = ids_of(TEXT), np.repeat([0, 1, 2], [6, 4, 5])
    one = CPC(encoder).relevance(ids, sentence_of, ids_of(QUESTION))
    other = CPC(encoder).relevance(ids, sentence_of, ids_of("it slept. 42"))
    assert np.abs(one - other).min() > 1e-4
