"""Bounds on the price of the rules of decoding: given, or of token reductions of a text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from umim_core import UMIM
from umim_core.rules.inspection import token_reduction
from umim_core.rules.matcher import Matcher
from umim_core.rules.pruning import cut_to_budget, rules_under
from umim_core.text.tokens import tokenize_documents


def damage_bounds(
    umim: UMIM, texts: Sequence[str], given: Sequence[float], reductions: Sequence[float]
) -> dict[float, float]:
    """Return the bounds on prices, each with the token reduction of texts by the rules under it.

    Rules of equal price are under a bound together, so it may save more than was asked for.

    Args:
        umim: Whose rules they are.
        texts: Documents; no rule crosses from one to the next.
        given: Bounds.
        reductions: Token reductions of the texts; each gives the least bound that reaches it.

    Raises:
        RuleSetError: If the rules have no prices, or do not reach a reduction.
        ConfigError: If a reduction is out of bounds.
    """
    if not given and not reductions:
        return {}
    rules, price = umim.rules, umim.rules.require_prices()
    ids = list(tokenize_documents(texts, umim.backbone.require_tokenizer()))
    text = np.concatenate(ids), np.cumsum([0, *map(len, ids)], dtype=np.int64)
    found = [*given, *(cut_to_budget(rules, price, text, target).most for target in reductions)]
    return {
        bound: token_reduction(*text, Matcher(rules_under(rules, bound)))
        for bound in dict.fromkeys(found)
    }
