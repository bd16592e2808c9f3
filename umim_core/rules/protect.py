"""Ids that no rule may contain: protected ones, special ones, and those beyond the vocabulary.

Example::

    protected_ids(tokenizer, ["digits", "^ ?not$"])     special ids, tokens with a digit, "not"
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from umim_core.backbone.fingerprint import special_ids
from umim_core.errors import ConfigError, RuleSetError, TokenizerMismatchError, require
from umim_core.rules.ruleset import RuleSet

NAMED_PATTERNS: Final = {"digits": r"\d", "capitals": r"^\s*[A-Z]", "newlines": r"[\n\r]"}


def protected_ids(
    tokenizer: PreTrainedTokenizerBase, patterns: Sequence[str] = ()
) -> NDArray[np.int64]:
    """Return the sorted ids (int64) of special tokens and of every token that a pattern matches."""
    special = special_ids(tokenizer)
    compiled = [(pattern, _compile(pattern)) for pattern in patterns]
    if not compiled:
        return np.array(sorted(special), dtype=np.int64)
    plain = sorted(set(tokenizer.get_vocab().values()) - special)
    texts = tokenizer.batch_decode([[i] for i in plain], clean_up_tokenization_spaces=False)
    protected = set(special)
    for pattern, expression in compiled:
        matching = {i for i, text in zip(plain, texts, strict=True) if expression.search(text)}
        require(
            len(matching) < len(plain),
            ConfigError,
            "a protected pattern must leave tokens that rules can use",
            f"{pattern!r}, which matches all {len(plain)}",
            "Give a narrower one.",
        )
        protected |= matching
    return np.array(sorted(protected), dtype=np.int64)


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(NAMED_PATTERNS.get(pattern, pattern))
    except re.error as error:
        raise ConfigError(
            f"a protected pattern must be a regular expression or one of {sorted(NAMED_PATTERNS)}",
            f"{pattern!r} ({error})",
            "Correct it.",
        ) from error


def check_for_module(
    rules: RuleSet, fingerprint: str, vocabulary: int, special: Collection[int]
) -> None:
    """Refuse rules that no merge module can be made for: another tokenizer's, or none at all.

    The tokenizer is given by its SHA-256, its number of entries and its special ids.
    """
    rules.check_tokenizer(fingerprint)
    check_vocabulary(rules, vocabulary, special)
    remedy = "Mine them again with a smaller --tau."
    require(len(rules) > 0, RuleSetError, "a checkpoint must hold rules", "none", remedy)


def check_vocabulary(rules: RuleSet, size: int, special: Collection[int]) -> None:
    """Refuse rules with ids that the vocabulary does not have, or with special ones."""
    top = max((int(ids.max()) for ids in rules.ids_by_order.values() if len(ids)), default=0)
    rule = f"rule ids must lie in 0..{size - 1}, the tokenizer's vocabulary"
    remedy = "Name the tokenizer that the rules were mined with."
    require(top < size, TokenizerMismatchError, rule, top, remedy)
    marks = np.array(sorted(special), dtype=np.int64)
    for ids in rules.ids_by_order.values():
        rows = np.isin(ids, marks).any(axis=1)
        if rows.any():
            raise RuleSetError(
                "rules must hold no special token of the tokenizer",
                f"{ids[rows][0].tolist()} and {int(rows.sum()) - 1} more of {ids.shape[1]} tokens",
                "Mine them again; special tokens are left out.",
            )
