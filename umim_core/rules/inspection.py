"""Inspection of a rule set and of its effect on held-out text, for people to look at."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from umim_core.rules.grams import pack_spans
from umim_core.rules.matcher import Matcher, token_reduction
from umim_core.rules.ruleset import RuleSet
from umim_core.text.token_ids import Ints


def collision_rate(rules: RuleSet) -> float:
    """Return the share of rules with the surrogate of another, whatever the weights; 0 without.

    Without positions a module sees each token's share of a span: sorted spans that repeat the same
    shortest block, (a a b b) and (a b) say, have one surrogate.
    """
    blocks = np.full((len(rules), rules.longest), -1, dtype=np.int32)
    for n, ids in rules.ids_by_order.items():
        spans, rows = np.sort(ids), np.flatnonzero(rules.sizes == n)
        for times in range(1, n + 1):  # each token of the block so often
            if n % times == 0:
                apart = spans.reshape(len(ids), n // times, times)
                equal = (apart == apart[:, :, :1]).all(axis=(1, 2))
                blocks[rows[equal]] = -1
                blocks[rows[equal], : n // times] = apart[equal, :, 0]
    sizes = np.unique(pack_spans(blocks + 1), return_counts=True)[1]  # rules of a surrogate
    return float(sizes[sizes > 1].sum() / len(rules)) if len(rules) else 0.0


def coverage(ids: NDArray[np.integer], offsets: Ints, matcher: Matcher) -> dict[str, Any]:
    """Segment held-out text, ids [T] and borders [num_segments + 1], and count what was merged.

    Returns:
        The tokens, segments and token reduction, and the merged spans of each order n.
    """
    _, lengths, _ = matcher.segment_many(ids, offsets)
    return {
        "tokens": len(ids),
        "segments": len(offsets) - 1,
        "token_reduction": token_reduction(len(ids), len(lengths)),
        "spans": {n: int((lengths == n).sum()) for n in matcher.rules.orders},
    }


def top_rules(rules: RuleSet, most: int) -> list[tuple[tuple[int, ...], int]]:
    """Return the ids and counts of the most frequent rules."""
    listed = []
    for place in np.argsort(-rules.support, kind="stable")[:most].tolist():
        n = int(rules.sizes[place])
        ids = tuple(rules.ids_by_order[n][place - rules.first_place(n)].tolist())
        listed.append((ids, int(rules.support[place])))
    return listed


def visible(text: str) -> str:
    """Return a text on one line: a space as ·, a line end as ↵, other unprintables escaped.

    Escaping keeps what a corpus holds (terminal control sequences, right-to-left marks) from
    acting on the terminal that shows it.
    """
    marks = {" ": "·", "\n": "↵", "\t": "⇥"}
    return "".join(
        marks.get(char) or (char if char.isprintable() else char.encode("unicode_escape").decode())
        for char in text
    )
