"""Protected ids: tokens that no rule may contain.

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

from umim_core.backbone.fingerprint import special_ids
from umim_core.errors import ConfigError

NAMED_PATTERNS: Final = {
    "digits": r"\d",
    "capitals": r"^\s*[A-Z]",
    "newlines": r"[\n\r]",
}


def protected_ids(
    tokenizer: PreTrainedTokenizerBase, patterns: Sequence[str] = ()
) -> NDArray[np.int64]:
    """Return the ids that take part in no rule.

    Args:
        tokenizer: The backbone's tokenizer.
        patterns: Regular expressions, searched in the decoded text of each single token, or names:
            ``digits`` (any digit), ``capitals`` (begins with a capital letter A-Z), ``newlines``.

    Returns:
        Sorted ids (int64): the special tokens, and every token that a pattern matches.

    Raises:
        ConfigError: If a pattern is no regular expression, or matches every token.
    """
    special = special_ids(tokenizer)
    compiled = [(pattern, _compile(pattern)) for pattern in patterns]
    if not compiled:
        return np.array(sorted(special), dtype=np.int64)
    plain = sorted(set(tokenizer.get_vocab().values()) - special)
    texts = tokenizer.batch_decode([[i] for i in plain], clean_up_tokenization_spaces=False)
    protected = set(special)
    for pattern, expression in compiled:
        found = {i for i, text in zip(plain, texts, strict=True) if expression.search(text)}
        if len(found) == len(plain):
            raise ConfigError(
                "a protected pattern must leave tokens that rules can use",
                f"{pattern!r}, which matches all {len(plain)}",
                "Give a narrower one.",
            )
        protected |= found
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
