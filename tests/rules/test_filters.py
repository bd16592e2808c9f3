"""Both filters against a quadratic reference, for every policy (RELIABILITY 3)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umim_core.rules.counting import MAX_TOKEN_ID, ORDERS, count_ngrams
from umim_core.rules.filters import Containment, Overlap, filter_rules, overlap_mask
from umim_core.rules.ruleset import RuleSet

Grams = dict[tuple[int, ...], int]
POLICIES = [(o, c) for o in ("greedy", "none") for c in ("drop", "keep")]


def compete(g: tuple[int, ...], h: tuple[int, ...]) -> bool:
    return g != h and (g[1:] == h[:-1] or h[1:] == g[:-1])


def inside(short: tuple[int, ...], long: tuple[int, ...]) -> bool:
    n = len(short)
    return any(long[i : i + n] == short for i in range(len(long) - n + 1))


def reference(grams: Grams, overlap: str, containment: str) -> tuple[set, set]:
    """Rules after the overlap filter and after both, by comparing every pair."""
    after: set[tuple[int, ...]] = set()
    for n in ORDERS:
        kept: list[tuple[int, ...]] = []
        for gram in sorted((g for g in grams if len(g) == n), key=lambda g: (-grams[g], g)):
            if overlap == "none" or not any(compete(gram, other) for other in kept):
                kept.append(gram)
        after |= set(kept)
    if containment == "keep":
        return after, after
    dropped = {g for g in after if any(len(h) > len(g) and inside(g, h) for h in after)}
    return after, after - dropped


def run(grams: Grams, overlap: Overlap, containment: Containment, order: list) -> tuple[set, set]:
    ids, support = {}, {}
    for n in ORDERS:
        rows = [gram for gram in order if len(gram) == n]
        ids[n] = np.array(rows, dtype=np.int32).reshape(-1, n)
        support[n] = np.array([grams[gram] for gram in rows], dtype=np.int64)
    masks = filter_rules(ids, support, overlap, containment)
    first, final = ({tuple(r) for n in ORDERS for r in ids[n][m[n]].tolist()} for m in masks)
    return first, final


def gram_tables(low: int = 0) -> st.SearchStrategy[Grams]:
    token = st.integers(low, low + 3)
    gram = st.one_of(*(st.tuples(*[token] * n) for n in ORDERS))
    return st.dictionaries(gram, st.integers(1, 4), max_size=60)


def test_docstring_example() -> None:
    ids = np.array([[0, 1], [1, 2], [2, 3]], dtype=np.int32)
    mask = overlap_mask(ids, np.array([9, 7, 5]), "greedy")
    assert mask.tolist() == [True, False, True]


@pytest.mark.parametrize(("overlap", "containment"), POLICIES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_equals_the_quadratic_reference_in_any_input_order(
    overlap: Overlap, containment: Containment, data: st.DataObject
) -> None:
    grams = data.draw(gram_tables(data.draw(st.sampled_from([0, MAX_TOKEN_ID - 3]))))
    order = data.draw(st.permutations(sorted(grams)))
    assert run(grams, overlap, containment, order) == reference(grams, overlap, containment)


@pytest.mark.parametrize("seed", range(5))
def test_equals_the_reference_on_real_counts(seed: int) -> None:
    stream = np.random.default_rng(seed).geometric(0.2, 3000) % 20
    counts = count_ngrams(stream, np.array([0, 3000], dtype=np.int64), 3)
    grams: Grams = {
        tuple(gram): int(support)
        for n in ORDERS
        for gram, support in zip(counts.ids(n).tolist(), counts.support[n], strict=True)
    }
    for overlap, containment in POLICIES:
        rules = RuleSet.from_counts(counts, overlap=overlap, containment=containment)
        kept = {tuple(rule) for n in ORDERS for rule in rules.ids_by_order[n].tolist()}
        assert kept == reference(grams, overlap, containment)[1]
        assert len(kept) > 0


@settings(max_examples=150, deadline=None)
@given(grams=gram_tables())
def test_the_form_of_the_paper_is_infix_free(grams: Grams) -> None:
    _, final = run(grams, "greedy", "drop", sorted(grams))
    assert not any(len(g) < len(h) and inside(g, h) for g in final for h in final)
    assert RuleSet.from_spans(final).infix_free


def test_a_rule_never_competes_with_itself() -> None:
    grams = {(5, 5): 3, (5, 5, 5): 3, (5, 5, 5, 5): 3}
    assert run(grams, "greedy", "keep", list(grams))[0] == set(grams)


def test_a_repeated_token_still_competes_with_others() -> None:
    grams = {(5, 5): 3, (5, 6): 2, (4, 5): 2, (6, 4): 1}
    assert run(grams, "greedy", "keep", list(grams))[0] == {(5, 5), (6, 4)}


def test_ties_are_broken_by_ascending_ids() -> None:
    grams = {(2, 3): 4, (1, 2): 4, (3, 4): 4}
    assert run(grams, "greedy", "keep", list(grams))[0] == {(1, 2), (3, 4)}


def test_a_longer_rule_dropped_by_the_overlap_filter_contains_nothing() -> None:
    grams = {(1, 2, 3): 9, (2, 3, 4): 5, (3, 4): 2, (1, 2): 3}
    assert run(grams, "greedy", "drop", list(grams))[1] == {(1, 2, 3), (3, 4)}


def test_no_rules_give_no_rules() -> None:
    assert run({}, "greedy", "drop", []) == (set(), set())
