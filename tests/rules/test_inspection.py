"""Inspection of rule sets against plain Python over the same rules."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.ngram_oracle import rules_of_counts, units_of
from umim_core.merging.module import MergeModule
from umim_core.rules.inspection import collision_rate, coverage, top_rules, visible
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.text.token_ids import flat

Span = tuple[int, ...]
SPANS = st.lists(st.integers(0, 3), min_size=2, max_size=6).map(tuple)
COUNTED = st.dictionaries(SPANS, st.integers(1, 9), max_size=12)
ROWS = st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=4).filter(any)


@given(COUNTED, ROWS)
def test_coverage_counts_tokens_segments_and_spans_of_each_order(
    counted: dict[Span, int], rows: list[list[int]]
) -> None:
    rules = rules_of_counts(counted)
    lengths = [length for row in rows for _, length in units_of(row, counted)]
    tokens = sum(map(len, rows))
    assert coverage(*flat(rows), Matcher(rules)) == {
        "tokens": tokens,
        "segments": len(rows),
        "token_reduction": (tokens - len(lengths)) / tokens,
        "spans": {n: lengths.count(n) for n in rules.orders},
    }


@given(COUNTED, st.integers(0, 14))
def test_top_rules_come_by_count_then_order_then_ids(counted: dict[Span, int], most: int) -> None:
    expected = sorted(counted, key=lambda span: (-counted[span], len(span), span))
    assert top_rules(rules_of_counts(counted), most) == [(s, counted[s]) for s in expected[:most]]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" of the", "·of·the"),
        ("\n\n\tx", "↵↵⇥x"),
        ("é漢", "é漢"),
        ("\x1b[31m", r"\x1b[31m"),
        ("\u202e\r", r"\u202e\r"),
        ("", ""),
    ],
)
def test_visible_text_is_one_line_of_printable_characters(text: str, shown: str) -> None:
    assert visible(text) == shown


WORDS = [span for n in (2, 3, 4) for span in product(range(3), repeat=n)]
LONG = [*WORDS, *product(range(2), repeat=6), (0, 1) * 6, (0, 1, 1, 0) * 4]


def profile(span: tuple[int, ...]) -> frozenset[tuple[int, Fraction]]:
    """The relative frequency of each token of a span."""
    return frozenset((token, Fraction(c, len(span))) for token, c in Counter(span).items())


def test_equals_the_rate_of_exact_relative_frequencies() -> None:
    spans = [span for span in LONG if list(span) == sorted(span)] + [(1, 0), (2, 1, 0, 0)]
    groups = Counter(map(profile, spans))
    expected = sum(count for count in groups.values() if count > 1) / len(spans)
    assert 0 < expected < 1
    assert collision_rate(RuleSet.from_spans(spans)) == pytest.approx(expected)


def test_pairs_collide_exactly_when_the_module_gives_them_one_surrogate() -> None:
    module = MergeModule(8, num_heads=2).double()
    module.initialise(1.0, torch.Generator().manual_seed(0))
    embeddings = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).double()
    with torch.no_grad():
        out = {s: module(embeddings[list(s)][None], torch.tensor([len(s)]))[0] for s in WORDS}
    for a, b in combinations(WORDS[::4], 2):
        equal = bool(torch.allclose(out[a], out[b], rtol=0, atol=1e-9))
        assert collision_rate(RuleSet.from_spans([a, b])) == float(equal)
