"""Check of rules against a vocabulary; a fingerprint may be unknown, or older than a rule."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from umim_core.errors import RuleSetError, TokenizerMismatchError
from umim_core.rules.ruleset import RuleSet


def check_vocabulary(rules: RuleSet, size: int, special: Collection[int]) -> None:
    """Refuse rules with ids that the vocabulary does not have, or with special ones.

    Args:
        rules: The rules.
        size: Entries of the vocabulary.
        special: Ids of special tokens; an end of text inside a span would be merged away.

    Raises:
        TokenizerMismatchError: If a rule has an id beyond the vocabulary.
        RuleSetError: If a rule has a special id.
    """
    top = max((int(ids.max()) for ids in rules.ids_by_order.values() if len(ids)), default=0)
    if top >= size:
        raise TokenizerMismatchError(
            f"rule ids must lie in 0..{size - 1}, the tokenizer's vocabulary",
            top,
            "Name the tokenizer that the rules were mined with.",
        )
    marks = np.array(sorted(special), dtype=np.int64)
    for ids in rules.ids_by_order.values():
        rows = np.isin(ids, marks).any(axis=1)
        if rows.any():
            raise RuleSetError(
                "rules must hold no special token of the tokenizer",
                f"{ids[rows][0].tolist()} and {int(rows.sum()) - 1} more of {ids.shape[1]} tokens",
                "Mine them again; special tokens are left out.",
            )
