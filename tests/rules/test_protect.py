"""Ids that no rule may contain: special tokens always, others by pattern."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from support.tiny_models import word_tokenizer
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.errors import ConfigError
from umim_core.rules.protect import NAMED_PATTERNS, protected_ids

Words = Callable[[list[str]], PreTrainedTokenizerFast]
VOCABULARY = ["<eos>", "a1", "2", "Bob", "bob", "x"]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer(VOCABULARY)


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        ([], []),
        (["digits"], ["a1", "2"]),
        (["capitals"], ["Bob"]),
        ([r"^\d$"], ["2"]),
        ([r"(?i)^bob$", r"^x$"], ["Bob", "bob", "x"]),
        (["newlines", "nothing like this"], []),
    ],
)
def test_patterns_protect_the_tokens_they_match_and_the_special_ones(
    tokenizer: PreTrainedTokenizerFast, patterns: list[str], words: list[str]
) -> None:
    ids = protected_ids(tokenizer, patterns)
    assert ids.dtype == np.int64
    assert [VOCABULARY[i] for i in ids] == ["<eos>", *words]


def test_a_special_token_is_protected_without_being_searched() -> None:
    assert protected_ids(word_tokenizer(["a", "<eos>"]), ["eos"]).tolist() == [1]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(a", r"regular expression or one of .*digits.*got '\(a'"),
        *((odd, "regular expression or one of") for odd in ("a{9999999999}", "(" * 9999, 5, b"x")),
        *((pattern, "matches all 5") for pattern in ("", ".", "a?")),
    ],
)
def test_a_pattern_that_is_bad_or_leaves_no_token_is_refused(
    tokenizer: PreTrainedTokenizerFast, pattern: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        protected_ids(tokenizer, ["digits", pattern])


@pytest.mark.parametrize("name", NAMED_PATTERNS)
def test_named_patterns_protect_part_of_a_real_vocabulary(name: str) -> None:
    tokenizer = load_tokenizer("umim-docs-llama")
    ids = protected_ids(tokenizer, [name])
    assert 10 < len(ids) < len(tokenizer) / 2
    assert set(tokenizer.all_special_ids) < set(ids.tolist())
