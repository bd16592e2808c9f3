"""Token reducers: exact budgets, protected tokens; registry."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from support.reduced_texts import WORDS, given, ids_of, word_backbone, word_classifier, word_encoder
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.lexical_units import passages, phrases, sentences, token_texts, words
from umim_core.baselines.llmlingua2 import LLMLingua2
from umim_core.baselines.methods import (
    EvictedColumns,
    Method,
    TargetReduction,
    Text,
    TokenReducer,
    reduce_tokens,
)
from umim_core.baselines.registry import BASELINES, find_baseline
from umim_core.baselines.sentence_cosine import SentenceCosine
from umim_core.baselines.truncation import Truncation
from umim_core.errors import ConfigError
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


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # of evaluator heads


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


def test_an_unknown_name_lists_all() -> None:
    with pytest.raises(ConfigError, match=r"must be one of cpc, ehpc.*mean 'truncation'"):
        find_baseline("truncations")
