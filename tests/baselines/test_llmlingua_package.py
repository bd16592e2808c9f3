"""LLMLingua and LLMLingua-2 against choices that package llmlingua 0.2.2 made of the same scores.

How they were recorded: ``support/llmlingua_choices.py``.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from support.llmlingua_choices import (
    CHOICES,
    TOKENIZER,
    PairLosses,
    pair_losses,
    piece_classifier,
)
from support.reduced_texts import given, word_backbone
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.baselines.lexical_units import token_texts
from umim_core.baselines.llmlingua import LLMLingua, published_choice
from umim_core.baselines.llmlingua2 import LLMLingua2
from umim_core.baselines.methods import reduce_tokens

RECORDED = json.loads(CHOICES.read_text("utf-8"))


def case_name(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values() if isinstance(value, int | float))


@pytest.mark.parametrize("case", RECORDED["losses"], ids=case_name)
def test_the_published_form_drops_what_the_package_drops(case: dict[str, Any]) -> None:
    tokens = case["tokens"]
    ids = np.arange(tokens)
    whole = np.concatenate([[0.0], pair_losses(tokens)[ids[:-1], ids[1:]]])
    free = np.zeros(tokens, dtype=bool)
    kept = published_choice(ids, free, case["budget"], case["segment"], whole, PairLosses(tokens))
    assert sorted(set(ids.tolist()) - set(kept.tolist())) == case["dropped"]


def test_the_published_form_keeps_protected_tokens_of_a_backbones_own_scores(
    rng: np.random.Generator,
) -> None:
    ids = rng.integers(1, 32, 60)
    reducer = LLMLingua(word_backbone("llama"), segment=10, form="published")
    for budget in (20, 40):
        found = reduce_tokens(reducer, given(ids, 3, 4, 5), budget)
        assert {3, 4, 5} <= set(found.kept.tolist())
        assert len(found.kept) not in (budget, 60)
        assert found.shortfall == len(found.kept) - budget


@pytest.mark.parametrize("case", RECORDED["words"], ids=lambda case: f"{case['rate']}")
def test_words_that_the_package_keeps_stay(case: dict[str, Any]) -> None:
    """At a budget of as many tokens as the package keeps, of texts of one chunk and of several."""
    tokenizer = load_tokenizer(TOKENIZER)
    text = case["text"]
    ids = np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)
    texts = token_texts(ids, tokenizer)
    starts, place = [], 0
    for word, _ in case["words"]:
        starts.append(text.index(word, place))
        place = starts[-1] + len(word)
    firsts = np.cumsum([0, *map(len, texts)])[:-1] + [len(t) - len(t.lstrip()) for t in texts]
    word_of = np.searchsorted(starts, firsts, side="right") - 1
    expected = [t for t, word in enumerate(word_of) if case["words"][word][1]]
    reducer = LLMLingua2(piece_classifier(), tokenizer, forced=())
    found = reduce_tokens(reducer, given(ids), len(expected))
    assert 0 < len(expected) < len(ids)
    assert found.kept.tolist() == expected
