"""Collisions: rules that a merge module without positions cannot tell apart.

Its surrogate is a softmax-weighted mean over a span's tokens, so it depends on the tokens' relative
frequencies alone. Repeated to 12 tokens, the least common multiple of 2, 3 and 4, and sorted, rules
of one surrogate are equal::

    (a, b)        aaaaaabbbbbb      one surrogate
    (b, a)        aaaaaabbbbbb
    (a, a, b, b)  aaaaaabbbbbb
    (a, a, b)     aaaaaaaabbbb      another
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from umim_core.rules.filters import pack_spans
from umim_core.rules.grams import ORDERS
from umim_core.rules.ruleset import RuleSet

_REPEATED: Final = math.lcm(*ORDERS)
_PER_KEY: Final = 3  # tokens that fit into one int64


def collision_rate(rules: RuleSet) -> float:
    """Return the share of rules that have the surrogate of another rule, whatever the weights.

    Returns:
        0 .. 1; 0 without rules.
    """
    _, sizes = _surrogates(rules)
    return float(sizes[sizes > 1].sum() / len(rules)) if len(rules) else 0.0


def collision_groups(rules: RuleSet, most: int) -> list[NDArray[np.int64]]:
    """Return rules that share a surrogate, the groups with the highest counts first.

    Returns:
        Per group the places [>= 2] of its rules in the rule set (sorted by n, then ids).
    """
    order, sizes = _surrogates(rules)
    ends = np.cumsum(sizes)
    support = np.concatenate([rules.support_by_order[n] for n in ORDERS])[order]
    total = np.diff(np.concatenate([[0], np.cumsum(support)[ends - 1]])) if len(rules) else sizes
    shared = np.flatnonzero(sizes > 1)
    first = shared[np.argsort(-total[shared], kind="stable")][:most]
    return [np.sort(order[ends[i] - sizes[i] : ends[i]]) for i in first]


def _surrogates(rules: RuleSet) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the places of the rules, equal surrogates together, and the size of each group."""
    tokens = np.concatenate(
        [np.sort(np.repeat(rules.ids_by_order[n], _REPEATED // n, axis=1)) for n in ORDERS]
    )
    columns = [pack_spans(tokens[:, at : at + _PER_KEY]) for at in range(0, _REPEATED, _PER_KEY)]
    order = np.lexsort(columns)
    unequal = np.zeros(len(order), dtype=np.bool_)
    unequal[:1] = True
    for column in columns:
        unequal[1:] |= np.diff(column[order]) != 0
    borders = np.append(np.flatnonzero(unequal), len(order))
    return order, np.diff(borders)
