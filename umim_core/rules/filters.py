"""The two rule filters: competition within an order, containment across orders.

Example (2-grams)::

    (a,b):9 (b,c):7 (c,d):5   (b,c) competes with (a,b) and is dropped; (c,d) then competes with
                              no kept rule and stays: greedy keeps (a,b) and (c,d).
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from umim_core.config.rule_options import Containment, Overlap
from umim_core.rules.grams import pack_spans
from umim_core.text.token_ids import Ids, Ints

Masks = dict[int, NDArray[np.bool_]]  # of rules [R_n] per order


@numba.njit(cache=True, nogil=True)
def _greedy(
    prefix: NDArray[np.int32], suffix: NDArray[np.int32], num_parts: int
) -> NDArray[np.bool_]:
    """Keep each rule that competes with no kept one; rules [R] come by rank, the best one first."""
    stays = np.zeros(prefix.size, dtype=np.bool_)
    has_prefix = np.zeros(num_parts, dtype=np.bool_)  # some kept rule starts with this part
    has_suffix = np.zeros(num_parts, dtype=np.bool_)
    for rule in range(prefix.size):
        if not (has_prefix[suffix[rule]] or has_suffix[prefix[rule]]):
            stays[rule] = True
            has_prefix[prefix[rule]] = True
            has_suffix[suffix[rule]] = True
    return stays


def _by_rank(support: Ints) -> NDArray[np.int64]:
    """Return rows [R] by descending count, ties in the order in which they are."""
    bits = int(support.size).bit_length()
    falling = int(support.max()) - support
    if int(falling.max()).bit_length() + bits > 63:
        return np.argsort(falling, kind="stable")
    # One sort of plain integers, several times faster than sorting indices.
    ranked = np.sort((falling << bits) | np.arange(support.size, dtype=np.int64))
    return ranked & ((1 << bits) - 1)


def overlap_mask(ids: Ids, support: Ints, policy: Overlap) -> NDArray[np.bool_]:
    """Return which rules [R, n] of one order survive the overlap filter: a mask [R].

    Rules are different, rows ascending. Two compete when the (n-1)-suffix of one is the
    (n-1)-prefix of the other; a rule never competes with itself. ``greedy``, the paper's filter
    made precise, goes by descending count, ties by ascending ids, and keeps a rule unless it
    competes with a kept one; ``none`` keeps all.
    """
    if policy == "none" or not len(ids):
        return np.ones(len(ids), dtype=np.bool_)
    prefix, suffix = pack_spans(ids[:, :-1]), pack_spans(ids[:, 1:])
    first = np.ones(len(ids), dtype=np.bool_)
    first[1:] = prefix[1:] != prefix[:-1]
    parts = prefix[first]
    # A suffix that no rule starts with competes with nothing: all such share the last index.
    places = np.searchsorted(parts, suffix)
    known = parts[np.minimum(places, parts.size - 1)] == suffix
    suffix_part = np.where(known, places, parts.size).astype(np.int32)
    prefix_part = (np.cumsum(first) - 1).astype(np.int32)
    ranking = _by_rank(support)
    mask = np.empty(len(ids), dtype=np.bool_)
    mask[ranking] = _greedy(prefix_part[ranking], suffix_part[ranking], parts.size + 1)
    return mask


def _inside_longer(ids_by_order: dict[int, Ids], passed: Masks) -> Masks:
    """Return which rules [R_n] per order lie inside a longer one that passed.

    Spans inside a rule are those inside its two parts, so each order hands its spans to the one
    below.
    """
    inside: Masks = {}
    spans = np.zeros((0, max(ids_by_order)), np.int32)
    for n in reversed(ids_by_order):
        inside[n] = np.isin(pack_spans(ids_by_order[n]), pack_spans(spans))
        spans = np.concatenate([spans, ids_by_order[n][passed[n]]])
        spans = np.concatenate([spans[:, :-1], spans[:, 1:]])
        spans = spans[np.unique(pack_spans(spans), return_index=True)[1]]
    return inside


def filter_rules(
    ids_by_order: dict[int, Ids],
    support_by_order: dict[int, Ints],
    overlap: Overlap,
    containment: Containment,
) -> tuple[Masks, Masks]:
    """Apply both filters: overlap within each order, then containment from the longest order down.

    Containment ``drop`` removes rules that lie inside a longer one that passed the overlap filter.
    Rules are [R_n, n] per order, rows ascending, counts [R_n].

    Returns:
        Masks [R_n] per order: after the overlap filter, and after both.

    Source: paper, "Intra-order Overlap Filtering" and "Cross-order Containment Filtering".
    """
    after_overlap = {
        n: overlap_mask(ids, support_by_order[n], overlap) for n, ids in ids_by_order.items()
    }
    if containment == "keep":
        return after_overlap, after_overlap
    inside = _inside_longer(ids_by_order, after_overlap)
    return after_overlap, {n: after_overlap[n] & ~inside[n] for n in ids_by_order}
