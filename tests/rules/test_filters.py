"""Grams, packed, chosen and filtered into rules: overlap, containment, budgets, chosen spans."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.ngram_oracle import document_oracle, grams_of
from umim_core.config.rule_options import Containment, Overlap
from umim_core.errors import CorpusError, RuleSetError
from umim_core.mining.counting import count_ngrams
from umim_core.mining.span_choice import choose_spans, saved_tokens
from umim_core.rules.filters import filter_rules, overlap_mask
from umim_core.rules.grams import ORDERS, NgramCounts, orders_to
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.text.token_ids import MAX_TOKEN_ID, TOKEN_BITS, flat, read_ids

Grams = dict[tuple[int, ...], int]
POLICIES = [(o, c) for o in ("greedy", "none") for c in ("drop", "keep")]


def inside(short: tuple[int, ...], long: tuple[int, ...]) -> bool:
    n = len(short)
    return any(long[i : i + n] == short for i in range(len(long) - n + 1))


def reference(grams: Grams, overlap: str, containment: str) -> tuple[set, set]:
    """Rules after the overlap filter, one after the other, and after both, pair by pair."""
    after: set[tuple[int, ...]] = set()
    starts, ends = set(), set()  # of kept rules, whose length tells them apart
    for gram in sorted(grams, key=lambda g: (-grams[g], g)):
        if overlap == "none" or (gram[1:] not in starts and gram[:-1] not in ends):
            after.add(gram)
            starts.add(gram[:-1])
            ends.add(gram[1:])
    if containment == "keep":
        return after, after
    dropped = {g for g in after if any(len(h) > len(g) and inside(g, h) for h in after)}
    return after, after - dropped


def run(grams: Grams, overlap: Overlap, containment: Containment) -> tuple[set, set]:
    ids, support = {}, {}
    orders = orders_to(max(map(len, grams), default=0))
    for n in orders:
        rows = [gram for gram in sorted(grams) if len(gram) == n]
        ids[n] = np.array(rows, dtype=np.int32).reshape(-1, n)
        support[n] = np.array([grams[gram] for gram in rows], dtype=np.int64)
    masks = filter_rules(ids, support, overlap, containment)
    first, final = ({tuple(r) for n in orders for r in ids[n][m[n]].tolist()} for m in masks)
    return first, final


def gram_tables(low: int = 0) -> st.SearchStrategy[Grams]:
    token = st.integers(low, low + 3)
    text = st.lists(token, min_size=20, max_size=20)  # one rule in another's text is often inside
    few = st.one_of(*(st.tuples(*[token] * n) for n in ORDERS))
    many = st.builds(
        lambda text, at, n: tuple(text[at : at + n]),
        st.shared(text, key="text") | text,
        st.integers(0, 4),
        st.integers(2, 16),
    )
    counts = st.integers(1, 4)
    return st.dictionaries(few, counts, max_size=60) | st.dictionaries(many, counts, max_size=40)


def test_docstring_example() -> None:
    ids = np.array([[0, 1], [1, 2], [2, 3]], dtype=np.int32)
    assert overlap_mask(ids, np.array([9, 7, 5]), "greedy").tolist() == [True, False, True]


@pytest.mark.parametrize(("overlap", "containment"), POLICIES)
@settings(max_examples=50)  # seeded bugs are found here
@given(data=st.data())
def test_equals_the_reference(
    overlap: Overlap, containment: Containment, data: st.DataObject
) -> None:
    grams = data.draw(gram_tables(data.draw(st.sampled_from([0, MAX_TOKEN_ID - 3]))))
    assert run(grams, overlap, containment) == reference(grams, overlap, containment)


@pytest.mark.parametrize("order", [2, 3, 4, 7])
@pytest.mark.parametrize("skew", [1.0, 3.0], ids=["many parts", "few parts"])
def test_equals_the_reference_on_many_rules(order: int, skew: float) -> None:
    rng = np.random.default_rng(order)
    tokens = 40 if order < 5 else 5
    ids = np.unique((tokens * rng.random((30_000, order)) ** skew).astype(np.int32), axis=0)
    support = (5 / (1 - rng.random(len(ids)))).astype(np.int64)
    grams = dict(zip(map(tuple, ids.tolist()), support.tolist(), strict=True))
    expected = reference(grams, "greedy", "keep")[0]
    assert set(map(tuple, ids[overlap_mask(ids, support, "greedy")].tolist())) == expected


def test_counts_too_large_to_be_packed_with_a_row_number_are_ranked_alike() -> None:
    ids = np.array([[1, 2], [2, 3], [3, 4], [5, 6]], dtype=np.int32)
    support = np.array([2**62, 2**62 + 1, 2**62, 1], dtype=np.int64)
    assert overlap_mask(ids, support, "greedy").tolist() == [False, True, False, True]


def test_spans_are_kept_by_the_tokens_that_they_save() -> None:
    """(1, 2, 3) saves 2 tokens thrice; (4, 5) 1 token four times; (1, 2) nothing beside it."""
    ids = np.array([1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 4, 5, 6, 7])
    rules = RuleSet.from_spans([(1, 2), (1, 2, 3), (4, 5), (6, 7)])
    borders = np.array([0, len(ids)])
    assert saved_tokens(rules, ids, borders).tolist() == [0, 4, 1, 6]  # by order, then ids
    assert grams_of(choose_spans(rules, ids, borders, 2)).keys() == {(1, 2, 3), (4, 5)}
    assert grams_of(choose_spans(rules, ids, borders, 9)).keys() == {(1, 2, 3), (4, 5), (6, 7)}


def test_a_span_that_a_longer_one_hides_is_worth_its_raw_rest() -> None:
    """(1, 2, 3) has the highest count x (n - 1), yet two pairs save more than it and one pair."""
    text = [1, 2, 3] * 3 + [1, 2, 4] * 3 + [5, 6] * 3
    rules = RuleSet.from_spans([(1, 2, 3), (1, 2), (5, 6)])
    left = choose_spans(rules, np.array(text), np.array([0, len(text)]), 2)
    assert grams_of(left).keys() == {(1, 2, 3), (1, 2)}


@pytest.mark.parametrize("seed", range(5))
def test_chosen_spans_save_at_least_as_much_as_those_of_the_highest_counts(seed: int) -> None:
    ids = np.random.default_rng(seed).zipf(1.6, 4000) % 12
    borders = np.array([0, 1000, 4000])
    grams = [tuple(ids[i : i + n].tolist()) for n in (2, 3, 4) for i in range(4000 - n + 1)]
    counts = Counter(grams)
    rules = RuleSet.from_spans(counts)
    support = {
        n: np.array([counts[tuple(row)] for row in part.tolist()], dtype=np.int64)
        for n, part in rules.ids_by_order.items()
    }
    chosen = choose_spans(replace(rules, support_by_order=support), ids, borders, 40)
    frequent = RuleSet.from_spans(sorted(counts, key=lambda g: -counts[g] * (len(g) - 1))[:40])
    assert len(chosen) <= 40

    def units(rules: RuleSet) -> int:
        return len(Matcher(rules).segment_many(ids, borders)[0])

    assert units(chosen) <= units(frequent)


SEGMENTS = [[1, 2, 3, 1, 2], [1, 2, 3, 9], [1, 2], [2, 3, 1, 2, 3, 1]]
ENDS = [5, 11, 17]


def counted(tau: int = 1) -> NgramCounts:
    """SEGMENTS with documents; the second one ends with the third segment."""
    counts = count_ngrams(*flat(SEGMENTS), tau)
    found = document_oracle(SEGMENTS, ENDS)
    documents = {
        n: np.array([found[tuple(gram)] for gram in counts.ids(n).tolist()], dtype=np.int64)
        for n in ORDERS
    }
    return NgramCounts(counts.keys, counts.support, tau, documents)


def test_a_key_is_the_rank_of_the_prefix_and_the_last_token() -> None:
    counts = count_ngrams(*flat([[7, 8, 9, 8, 9, 6]]), 1)
    assert counts.ids(2).tolist() == [[7, 8], [8, 9], [9, 6], [9, 8]]
    assert counts.keys[2].tolist() == [(a << TOKEN_BITS) | b for a, b in counts.ids(2).tolist()]
    assert counts.ids(3).tolist() == [[7, 8, 9], [8, 9, 6], [8, 9, 8], [9, 8, 9]]
    ranks = (0, 1, 1, 3)
    pairs = zip(ranks, (9, 6, 8, 9), strict=True)
    assert counts.keys[3].tolist() == [(rank << TOKEN_BITS) | token for rank, token in pairs]
    assert len(counts) == 4 + 4 + 3


@pytest.mark.parametrize(
    ("documents", "tau", "least", "message"),
    [
        (True, 2, 1, "tau must be at least 3, the threshold of the counts"),
        (True, 3, 0, "min_documents must be 1, or above .*; got 0"),
        (True, 3, -1, "min_documents must be 1, or above .*; got -1"),
        (False, 3, 2, r"where documents were counted; got 2\. Count"),
    ],
)
def test_what_was_not_counted_cannot_be_asked_for(
    documents: bool, tau: int, least: int, message: str
) -> None:
    counts = counted(3)
    with pytest.raises(RuleSetError, match=message):
        (counts if documents else replace(counts, documents=None)).frequent(tau, least)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int32, np.int64, np.uint64])
def test_ids_are_read_as_one_type_and_cannot_be_written(dtype: type[np.integer]) -> None:
    for writeable in (True, False):
        ids = np.array([5, 6, 7, 8], dtype=dtype)
        ids.flags.writeable = writeable
        got = read_ids(ids, 1, 3)
        assert (got.tolist(), got.dtype) == ([6, 7], np.int32)
        assert not got.flags.writeable
        assert ids.flags.writeable is writeable, "the array itself stays as it was"
    apart = read_ids(np.arange(10, dtype=dtype)[::2], 1, 4)
    assert apart.tolist() == [2, 4, 6] and apart.flags.c_contiguous


@pytest.mark.parametrize(("low", "high", "found"), [(2, 6, "3 of 4"), (5, 7, "0 of 2")])
def test_ids_that_are_missing_are_not_taken_for_the_end(low: int, high: int, found: str) -> None:
    message = f"tokens {low} to {high} of the corpus must be there; got {found}. On a shared file"
    with pytest.raises(CorpusError, match=message):
        read_ids(np.arange(5, dtype=np.int32), low, high)
