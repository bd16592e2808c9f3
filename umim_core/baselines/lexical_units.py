"""Lexical units of a token sequence: words, phrases, sentences and passages, as unit numbers.

A worked example, with one token per word and mark::

    tokens      The  cat  sat  on  the  mat  .  It  slept  .
    words        0    1    2   3    4    5   5   6    7    7     a mark belongs to its word
    phrases      0    0    0   1    1    1   1   2    2    2     cut before a function word
    sentences    0    0    0   0    0    0   0   1    1    1

Phrases stand in for the noun phrases of a parser: a phrase is function words and the content words
after them. Passages are separated by blank lines.

Shapes: T tokens, at least one.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Final

import numpy as np
from transformers import PreTrainedTokenizerBase

from umim_core.text.token_ids import Ints

_SENTENCE_END: Final = re.compile(r"[.!?。！？]['\"”’)\]]*\s*$")
_PHRASE_END: Final = re.compile(r"[.,;:!?)\]]['\"”’]*\s*$")
_FUNCTION_WORDS: Final = frozenset(
    re.findall(
        r"\w+",
        "a an the this that these those my your his her its our their some any no each every "
        "all both of in on at by for with from to into onto over under about after before "
        "between through during without within against among and or but nor so yet if "
        "because while although as than when where who whom whose which what how is are was "
        "were be been being am do does did has have had will would can could shall should "
        "may might must not it he she they we you i",
    )
)


def token_texts(ids: Ints, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text that every token [T] adds to the one before it, its leading space included.

    A token that ends a character which others began has a replacement mark of its own.
    """
    flat = ids.tolist()
    singles = _decoded([[one] for one in flat], tokenizer)
    pairs = _decoded([list(pair) for pair in pairwise(flat)], tokenizer)
    added = [
        pair.removeprefix(before) if pair.startswith(before) else single
        for pair, before, single in zip(pairs, singles, singles[1:], strict=False)
    ]
    return singles[:1] + added


def _decoded(rows: list[list[int]], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return list(tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False)) if rows else []


def words(texts: list[str]) -> Ints:
    """Number words [T]: a word begins where white space stands before a token."""
    starts = [text[:1].isspace() or before[-1:].isspace() for before, text in pairwise(texts)]
    return _numbered(starts)


def phrases(texts: list[str]) -> Ints:
    """Number phrases [T]: cut after punctuation, and where a function word follows another word."""
    word_of = words(texts)
    whole = [""] * (int(word_of[-1]) + 1)
    for number, text in zip(word_of.tolist(), texts, strict=True):
        whole[number] += text
    function = [word.strip().lower() in _FUNCTION_WORDS for word in whole]
    cut = [
        bool(_PHRASE_END.search(whole[k])) or (function[k + 1] and not function[k])
        for k in range(len(whole) - 1)
    ]
    return _numbered(cut)[word_of]


def sentences(texts: list[str]) -> Ints:
    """Number sentences [T]: cut after a full stop before white space, and after a line break."""
    return _numbered(
        [
            "\n" in text
            or (bool(_SENTENCE_END.search(text)) and (text[-1:].isspace() or after[:1].isspace()))
            for text, after in pairwise(texts)
        ]
    )


def passages(texts: list[str]) -> Ints:
    """Number passages [T]: cut after a blank line."""
    befores = ["", *texts]
    return _numbered(
        [
            "\n\n" in before[-1:] + text and not after.startswith("\n")
            for before, text, after in zip(befores, texts, texts[1:], strict=False)
        ]
    )


def _numbered(cuts: list[bool]) -> Ints:
    """Number the units of T tokens, given whether one ends after each token but the last."""
    return np.cumsum(np.array([0, *cuts], dtype=np.int64))
