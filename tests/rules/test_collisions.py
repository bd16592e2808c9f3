"""The collision rate of a rule set, against a worked example, an oracle and the module itself."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations, product

import pytest
import torch

from umim_core.merging.module import MergeModule
from umim_core.rules.inspection import collision_groups, collision_rate
from umim_core.rules.ruleset import RuleSet

SPANS = [span for n in (2, 3, 4) for span in product(range(3), repeat=n)]


def profile(span: tuple[int, ...]) -> frozenset[tuple[int, Fraction]]:
    """The relative frequency of each token of a span."""
    return frozenset((token, Fraction(c, len(span))) for token, c in Counter(span).items())


@pytest.mark.parametrize("spans", [[], [(7, 8)], [(1, 2), (1, 1, 2), (1, 1, 1, 2), (1, 2, 3)]])
def test_rules_of_different_frequencies_do_not_collide(spans: list[tuple[int, ...]]) -> None:
    assert collision_rate(RuleSet.from_spans(spans)) == 0.0


def test_equals_the_rate_of_exact_relative_frequencies() -> None:
    spans = [span for span in SPANS if list(span) == sorted(span)] + [(1, 0), (2, 1, 0, 0)]
    groups = Counter(map(profile, spans))
    expected = sum(count for count in groups.values() if count > 1) / len(spans)
    assert 0 < expected < 1
    assert collision_rate(RuleSet.from_spans(spans)) == pytest.approx(expected)


def test_groups_are_the_rules_of_equal_relative_frequencies() -> None:
    groups: dict[object, list[int]] = {}
    for place, span in enumerate(SPANS):  # in the order of a rule set: by n, then ids
        groups.setdefault(profile(span), []).append(place)
    shared = sorted((g for g in groups.values() if len(g) > 1), key=lambda g: (-len(g), g))
    found = [group.tolist() for group in collision_groups(RuleSet.from_spans(SPANS), len(SPANS))]
    assert sorted(found, key=lambda g: (-len(g), g)) == shared
    assert [len(g) for g in found] == [len(g) for g in shared]  # every count is 1
    assert collision_groups(RuleSet.from_spans(SPANS), 2)[1].tolist() == found[1]


@pytest.mark.parametrize("spans", [[], [(7, 8)], [(1, 2), (1, 2, 3)]])
def test_rules_that_stand_alone_make_no_group(spans: list[tuple[int, ...]]) -> None:
    assert collision_groups(RuleSet.from_spans(spans), 5) == []


def test_pairs_collide_exactly_when_the_module_gives_them_one_surrogate() -> None:
    module = MergeModule(8, 2).double()
    module.initialise(1.0, torch.Generator().manual_seed(0))
    embeddings = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).double()
    with torch.no_grad():
        out = {s: module(embeddings[list(s)][None], torch.tensor([len(s)]))[0] for s in SPANS}
    for a, b in combinations(SPANS[::4], 2):
        equal = bool(torch.allclose(out[a], out[b], rtol=0, atol=1e-9))
        assert collision_rate(RuleSet.from_spans([a, b])) == float(equal)
