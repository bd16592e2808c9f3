"""Sentences by cosine against means of the models' own hidden states; CPC's encoder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from support.reduced_texts import given, ids_of, word_encoder
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.methods import Ints, reduce_tokens
from umim_core.baselines.registry import find_baseline, own_model
from umim_core.baselines.sentence_cosine import BackboneEncoder, SentenceCosine, TextEncoder
from umim_core.errors import BackboneError
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

TEXT = "the cat sat in the mat. it ran and slept. the dog of the mat."
PARTS = [range(6), range(6, 10), range(10, 15)]
QUESTION = "the dog ran what?"


def by_cosine(backbone: Backbone) -> SentenceCosine:
    return SentenceCosine(BackboneEncoder(backbone), backbone.require_tokenizer())


@torch.no_grad()
def states(ids: Ints, backbone: Backbone) -> np.ndarray:
    found: np.ndarray = (
        backbone.trunk(input_ids=torch.from_numpy(ids)[None]).last_hidden_state[0].numpy()
    )
    return found


def cosine(left: np.ndarray, right: np.ndarray) -> float:
    return float(left @ right / np.linalg.norm(left) / np.linalg.norm(right))


@pytest.mark.parametrize("budget", [3, 8, 12])
def test_sentences_like_the_question_stay_and_the_last_is_trimmed(
    budget: int, backbone: Backbone
) -> None:
    """The question is encoded apart: text and question do not see each other."""
    ids = ids_of(TEXT)
    asked, text = states(ids_of(QUESTION), backbone).mean(0), states(ids, backbone)
    scores = [cosine(text[list(part)].mean(0), asked) for part in PARTS]
    order = sorted(range(3), key=lambda k: -scores[k])
    expected = sorted([t for k in order for t in PARTS[k]][:budget])
    found = reduce_tokens(by_cosine(backbone), given(ids, question=QUESTION), budget)
    assert found.tolist() == expected


def test_without_a_question_the_last_sentence_is_one(backbone: Backbone) -> None:
    ids = ids_of(TEXT)
    asked = given(ids, question="the dog of the mat.")
    for budget in (3, 8, 12):
        unasked = reduce_tokens(by_cosine(backbone), given(ids), budget).tolist()
        assert unasked == reduce_tokens(by_cosine(backbone), asked, budget).tolist()


def test_cpc_runs_only_where_its_encoder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backbone: Backbone
) -> None:
    rules = Matcher(RuleSet.from_spans([(1, 2)]))
    monkeypatch.delenv("UMIM_CPC_ENCODER", raising=False)
    for ask in (lambda: own_model("cpc"), lambda: find_baseline("cpc").make(backbone, rules)):
        with pytest.raises(BackboneError, match="UMIM_CPC_ENCODER names none"):
            ask()
    encoder = word_encoder(backbone.require_tokenizer())
    place = tmp_path / "encoder"
    encoder.model.save_pretrained(place)
    encoder.tokenizer.save_pretrained(place)
    monkeypatch.setenv("UMIM_CPC_ENCODER", str(place))
    method = find_baseline("cpc").make(backbone, rules)
    assert str(own_model("cpc")).startswith("encoder@")
    assert isinstance(method.encoder, TextEncoder)
    assert len(reduce_tokens(method, given(ids_of(TEXT), question=QUESTION), 8)) == 8
