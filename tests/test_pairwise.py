from __future__ import annotations

from itertools import combinations, product

import pytest

from support.pairwise import covering


@pytest.mark.parametrize("sizes", [(3,), (2, 2), (2, 2, 2), (8, 2, 2), (3, 4, 2, 2), (5, 5, 5)])
def test_every_pair_of_values_is_covered_by_few_combinations(sizes: tuple[int, ...]) -> None:
    axes = [range(size) for size in sizes]
    found = covering(axes)
    for a, b in combinations(range(len(sizes)), 2):
        assert {(chosen[a], chosen[b]) for chosen in found} == set(product(axes[a], axes[b]))
    two_largest = sorted([1, *sizes])[-2:]
    assert len(found) <= 1.5 * two_largest[0] * two_largest[1] + 1
