from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tasks.data.counting import _added
from tasks.data.counting_tables import packed_row
from umim_core.errors import ClusterError
from umim_core.rules.grams import ORDERS

SIZES = {2: 3, 3: 2, 4: 1}


def partial_counts(ranges: int) -> list[pa.Table]:
    """The rows of all ranges: range r counts r + 1 of everything, in r documents."""
    return [
        packed_row(
            {"order": n},
            ranges=np.array([r]),
            support=np.full(SIZES[n], r + 1),
            documents=np.full(SIZES[n], r),
        )
        for r in range(ranges)
        for n in ORDERS
    ]


def test_ranges_are_added_up_in_any_order() -> None:
    rows = partial_counts(3)
    support, documents = _added([pa.concat_tables(rows[4:]), *rows[3::-1]], SIZES, SIZES, 3)
    assert {n: found.tolist() for n, found in support.items()} == {n: [6] * SIZES[n] for n in SIZES}
    assert {n: found.tolist() for n, found in documents.items()} == {
        n: [3] * SIZES[n] for n in SIZES
    }


@pytest.mark.parametrize("lost", range(9))
def test_a_range_that_comes_twice_does_not_stand_for_one_that_is_lost(lost: int) -> None:
    rows = partial_counts(3)
    rows[lost] = rows[(lost + 3) % 9]
    with pytest.raises(ClusterError, match=f"ranges must be .* once; .* of {2 + lost % 3}-grams"):
        _added(rows, SIZES, SIZES, 3)


def test_a_range_that_nobody_asked_for_is_refused() -> None:
    with pytest.raises(ClusterError, match="each of 2 ranges must be counted once"):
        _added(partial_counts(3), SIZES, SIZES, 2)
