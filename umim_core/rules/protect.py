"""Ids that no rule may contain: special ones, and those of tokens that patterns protect.

Example::

    protected_ids(tokenizer, ["digits", "^ ?not$"])     special ids, tokens with a digit, "not"
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from umim_core.backbone.tokenizer_files import special_ids
from umim_core.errors import ConfigError, require

NAMED_PATTERNS: Final = {"digits": r"\d", "capitals": r"^\s*[A-Z]", "newlines": r"[\n\r]"}


def protected_ids(
    tokenizer: PreTrainedTokenizerBase, patterns: Sequence[str] = ()
) -> NDArray[np.int64]:
    """Return the sorted ids (int64) of special tokens and of every token that a pattern matches."""
    special = special_ids(tokenizer)
    compiled = [(pattern, compiled_pattern(pattern)) for pattern in patterns]
    if not compiled:
        return np.array(sorted(special), dtype=np.int64)
    plain = sorted(set(tokenizer.get_vocab().values()) - special)
    texts = tokenizer.batch_decode([[i] for i in plain], clean_up_tokenization_spaces=False)
    protected = set(special)
    for pattern, expression in compiled:
        matching = {i for i, text in zip(plain, texts, strict=True) if expression.search(text)}
        rule = "a protected pattern must leave tokens that rules can use"
        found = f"{pattern!r}, which matches all {len(plain)}"
        require(len(matching) < len(plain), ConfigError, rule, found, "Give a narrower one.")
        protected |= matching
    return np.array(sorted(protected), dtype=np.int64)


def compiled_pattern(pattern: str) -> re.Pattern[str]:
    """Return a named pattern, or a regular expression, compiled; another one is refused."""
    given: object = pattern
    try:
        if not isinstance(given, str):
            raise TypeError("no text")
        return re.compile(NAMED_PATTERNS.get(given, given))
    except (re.error, OverflowError, RecursionError, TypeError) as error:
        raise ConfigError(
            f"a protected pattern must be a regular expression or one of {sorted(NAMED_PATTERNS)}",
            f"{pattern!r} ({error})",
            "Correct it.",
        ) from error
