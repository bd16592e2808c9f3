from __future__ import annotations

from support.reduced_texts import ids_of, word_backbone
from umim_core.baselines.lexical_units import passages, phrases, sentences, token_texts, words

TEXTS = ["The", " cat", " sat", " on", " the", " mat", ".", " It", " slept", "."]


def test_the_worked_example() -> None:
    assert words(TEXTS).tolist() == [0, 1, 2, 3, 4, 5, 5, 6, 7, 7]
    assert phrases(TEXTS).tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert sentences(TEXTS).tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]


def test_passages_are_cut_after_blank_lines() -> None:
    texts = ["One", "\n", "line", ".\n", "\n", "Two", "\n\n", "\n", "Three"]
    assert passages(texts).tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 2]


def test_texts_of_tokens_make_the_text_again() -> None:
    backbone = word_backbone("llama")
    ids = ids_of("the cat slept. 42")
    assert token_texts(ids, backbone.require_tokenizer()) == ["the", " cat", " slept.", " 42"]
