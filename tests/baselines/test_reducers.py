"""Token reducers: exact budgets, protected tokens; sentences by cosine; registry."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from support.reduced_texts import WORDS, given, ids_of, word_backbone, word_classifier, word_encoder
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.lexical_units import passages, phrases, sentences, token_texts, words
from umim_core.baselines.llmlingua2 import LLMLingua2
from umim_core.baselines.methods import (
    EvictedColumns,
    Ints,
    Method,
    TargetReduction,
    Text,
    TokenReducer,
    reduce_tokens,
)
from umim_core.baselines.registry import BASELINES, find_baseline, own_model
from umim_core.baselines.sentence_cosine import BackboneEncoder, SentenceCosine, TextEncoder
from umim_core.baselines.truncation import Truncation
from umim_core.errors import BackboneError
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

NOTHING = np.array([], dtype=np.int64)


def text(*protected: bool) -> Text:
    return Text(np.arange(len(protected), dtype=np.int64), np.array(protected), NOTHING)


def test_truncation_keeps_the_end_and_what_is_protected() -> None:
    for kept, budget, protected in (
        ([0, 4, 5], 3, (True, False, False, False, False, False)),
        ([1, 2], 2, (False, False, False)),
        ([], 0, ()),
        ([0], 1, (False,)),
    ):
        assert reduce_tokens(Truncation(), text(*protected), budget).tolist() == kept
    with pytest.raises(AssertionError):
        reduce_tokens(Truncation(), text(False), 2)


@pytest.mark.parametrize(
    ("target", "tokens", "stay"),
    [(0.14, 50, 43), (0.14, 10, 9), (0.14, 3, 3), (0.3, 7, 5), (0.6, 1, 1), (0.99, 40, 1)],
)
def test_a_target_drops_its_share_rounded(target: float, tokens: int, stay: int) -> None:
    assert TargetReduction(target).stays(tokens) == stay


@hypothesis.given(st.floats(0.01, 0.99), st.integers(1, 60), st.integers(1, 60))
def test_the_longest_end_of_a_text_is_taken_whose_share_fits(
    target: float, tokens: int, room: int
) -> None:
    wanted = TargetReduction(target)
    ids, stay = wanted.fit(np.arange(tokens), room)
    fitting = [length for length in range(1, tokens + 1) if wanted.stays(length) <= room]
    assert ids.tolist() == list(range(tokens - max(fitting), tokens))
    assert stay == wanted.stays(len(ids))


MERGING = ("-embedding", "-spans", "-neighbours")
REDUCERS = [
    name for name, each in BASELINES.items() if each.side == "prompt" and not name.endswith(MERGING)
]
RULES = Matcher(RuleSet.from_spans([(1, 2)]))


def made(name: str, backbone: Backbone) -> Method:
    """A baseline; the models of their own that some have are tiny ones."""
    tokenizer = backbone.require_tokenizer()
    if name == "llmlingua2":
        return LLMLingua2(word_classifier(), tokenizer, forced=("what?",))
    if name == "cpc":
        return SentenceCosine(word_encoder(tokenizer), tokenizer)
    return find_baseline(name).make(backbone, RULES)


@pytest.mark.parametrize("name", REDUCERS)
def test_budgets_are_exact_protected_tokens_stay_and_repeats_agree(
    name: str, backbone: Backbone, rng: np.random.Generator
) -> None:
    reducer = made(name, backbone)
    assert isinstance(reducer, TokenReducer)
    for tokens in (1, 5, 90):  # the last is longer than the 64 positions
        ids = rng.integers(1, len(WORDS), tokens)
        for budget in sorted({1, tokens // 2 + 1}):
            protected = rng.permutation(tokens)[: rng.integers(0, 3)]
            text = given(ids, *protected, question="what? cat")
            found = reduce_tokens(reducer, text, budget)
            places = [-1, *found.tolist(), tokens]
            assert len(found) and all(a < b for a, b in pairwise(places))
            assert set(protected.tolist()) <= set(places)
            if name != "llmlingua-published":
                assert len(found) == max(budget, len(protected))
            assert reduce_tokens(reducer, text, budget).tolist() == found.tolist()


def test_a_method_has_the_side_that_its_entry_names() -> None:
    backbone = word_backbone("llama")
    for name, baseline in BASELINES.items():
        on_cache = isinstance(made(name, backbone), EvictedColumns)
        assert on_cache is (baseline.side == "cache"), name


TEXTS = ["The", " cat", " sat", " on", " the", " mat", ".", " It", " slept", "."]


def test_units_are_those_of_the_worked_example() -> None:
    assert words(TEXTS).tolist() == [0, 1, 2, 3, 4, 5, 5, 6, 7, 7]
    assert phrases(TEXTS).tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert sentences(TEXTS).tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]
    blank_lines = ["One", "\n", "line", ".\n", "\n", "Two", "\n\n", "\n", "Three"]
    assert passages(blank_lines).tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 2]
    tokenizer = word_backbone("llama").require_tokenizer()
    assert token_texts(ids_of("the cat slept. 42"), tokenizer) == ["the", " cat", " slept.", " 42"]


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
    monkeypatch.delenv("UMIM_CPC_ENCODER", raising=False)
    for ask in (lambda: own_model("cpc"), lambda: find_baseline("cpc").make(backbone, RULES)):
        with pytest.raises(BackboneError, match="UMIM_CPC_ENCODER names none"):
            ask()
    encoder = word_encoder(backbone.require_tokenizer())
    place = tmp_path / "encoder"
    encoder.model.save_pretrained(place)
    encoder.tokenizer.save_pretrained(place)
    monkeypatch.setenv("UMIM_CPC_ENCODER", str(place))
    method = find_baseline("cpc").make(backbone, RULES)
    assert str(own_model("cpc")).startswith("encoder@")
    assert isinstance(method.encoder, TextEncoder)
    assert len(reduce_tokens(method, given(ids_of(TEXT), question=QUESTION), 8)) == 8


@torch.no_grad()
def test_special_tokens_of_an_encoder_are_of_no_sentence() -> None:
    encoder = word_encoder(word_backbone("llama").require_tokenizer())
    encoder.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="[UNK] $A [UNK]", special_tokens=[("[UNK]", 0)]
    )
    found = encoder.sums(ids_of("the cat sat"), np.array([0, 0, 1]))
    [row] = encoder.tokenizer(["the cat sat"])["input_ids"]
    states = encoder.model(torch.tensor([row])).last_hidden_state[0].double()
    torch.testing.assert_close(found, torch.stack([states[1] + states[2], states[3]]))
