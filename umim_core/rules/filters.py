"""The two rule filters: competition within an order, containment across orders.

Example (2-grams)::

    (a,b):9 (b,c):7 (c,d):5   (b,c) competes with (a,b) and is dropped; (c,d) then competes with
                              no kept rule and stays: greedy keeps (a,b) and (c,d).
"""

from __future__ import annotations

from typing import Literal

import numba
import numpy as np
from numpy.typing import NDArray

from umim_core.rules.counting import ORDERS, TOKEN_BITS, NgramCounts

Overlap = Literal["greedy", "none"]
Containment = Literal["drop", "keep"]
Ids = NDArray[np.int32]
Counts = NDArray[np.int64]


def pack_spans(ids: NDArray[np.integer]) -> NDArray[np.int64]:
    """Pack rows of at most three token ids [R, n] into int64 keys [R] that sort like the rows."""
    keys = np.zeros(ids.shape[0], dtype=np.int64)
    for column in range(ids.shape[1]):
        keys = (keys << TOKEN_BITS) | ids[:, column].astype(np.int64)
    return keys


@numba.njit(cache=True)
def _greedy(
    order: NDArray[np.int64],
    prefix: NDArray[np.int64],
    suffix: NDArray[np.int64],
    num_parts: int,
) -> NDArray[np.bool_]:
    kept = np.zeros(order.size, dtype=np.bool_)
    has_prefix = np.zeros(num_parts, dtype=np.bool_)  # some kept rule starts with this part
    has_suffix = np.zeros(num_parts, dtype=np.bool_)
    for rule in order:
        if has_prefix[suffix[rule]] or has_suffix[prefix[rule]]:
            continue
        kept[rule] = True
        has_prefix[prefix[rule]] = True
        has_suffix[suffix[rule]] = True
    return kept


def overlap_mask(ids: Ids, support: Counts, policy: Overlap) -> NDArray[np.bool_]:
    """Return which rules of one order survive the overlap filter.

    Two rules compete when the (n-1)-suffix of one is the (n-1)-prefix of the other; a rule never
    competes with itself. ``greedy`` walks through the rules by descending count, ties by ascending
    ids, and keeps a rule unless it competes with a kept one.

    Args:
        ids: Rules [R, n], all different.
        support: Counts [R].
        policy: ``greedy`` (the paper's filter, made precise) or ``none``.

    Returns:
        Mask [R].
    """
    if policy == "none" or not len(ids):
        return np.ones(len(ids), dtype=np.bool_)
    prefix, suffix = pack_spans(ids[:, :-1]), pack_spans(ids[:, 1:])
    parts, inverse = np.unique(np.concatenate([prefix, suffix]), return_inverse=True)
    ranking = np.lexsort((*ids.T[::-1], -support)).astype(np.int64)
    mask: NDArray[np.bool_] = _greedy(ranking, inverse[: len(ids)], inverse[len(ids) :], len(parts))
    return mask


def containment_mask(ids: Ids, longer: list[Ids], policy: Containment) -> NDArray[np.bool_]:
    """Return which rules of one order lie inside no longer rule.

    Args:
        ids: Rules [R, n].
        longer: Kept rules of every higher order.
        policy: ``drop`` removes contained rules, ``keep`` keeps them.

    Returns:
        Mask [R].
    """
    if policy == "keep" or not len(ids):
        return np.ones(len(ids), dtype=np.bool_)
    width = ids.shape[1]
    inside = [
        pack_spans(rules[:, start : start + width])
        for rules in longer
        for start in range(rules.shape[1] - width + 1)
    ]
    if not inside:
        return np.ones(len(ids), dtype=np.bool_)
    return ~np.isin(pack_spans(ids), np.concatenate(inside))


def filter_rules(
    ids_by_order: dict[int, Ids],
    support_by_order: dict[int, Counts],
    overlap: Overlap,
    containment: Containment,
) -> tuple[dict[int, NDArray[np.bool_]], dict[int, NDArray[np.bool_]]]:
    """Apply both filters: overlap within each order, then containment from the longest order down.

    Args:
        ids_by_order: Rules [R_n, n] per order.
        support_by_order: Counts [R_n] per order.
        overlap: Policy within an order.
        containment: Policy across orders.

    Returns:
        Masks [R_n] per order: after the overlap filter, and after both.

    Source: paper, "Intra-order Overlap Filtering" and "Cross-order Containment Filtering".
    """
    after_overlap: dict[int, NDArray[np.bool_]] = {}
    final: dict[int, NDArray[np.bool_]] = {}
    for n in ORDERS:
        after_overlap[n] = overlap_mask(ids_by_order[n], support_by_order[n], overlap)
    longer: list[Ids] = []
    for n in reversed(ORDERS):
        kept = ids_by_order[n][after_overlap[n]]
        final[n] = after_overlap[n].copy()
        final[n][after_overlap[n]] = containment_mask(kept, longer, containment)
        longer.append(kept)
    return after_overlap, final


def step_counts(
    counts: NgramCounts, tau: int, overlap: Overlap
) -> tuple[dict[int, int], dict[int, int]]:
    """Return how many n-grams of each order reach ``tau``, and how many pass the overlap filter."""
    raw, passed = {}, {}
    for n in ORDERS:
        enough = counts.support[n] >= tau
        ids, support = counts.ids(n)[enough], counts.support[n][enough]
        raw[n], passed[n] = len(ids), int(overlap_mask(ids, support, overlap).sum())
    return raw, passed
