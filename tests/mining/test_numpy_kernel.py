"""The counting in plain numpy: blocks counted and added up."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umim_core.errors import CorpusError, RuleSetError
from umim_core.mining.counting import count_ngrams
from umim_core.mining.numpy_kernel import add_counts, local_counts
from umim_core.rules.grams import ORDERS


def part(key: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array([key], dtype=np.int64), np.array([number], dtype=np.int64)


def test_the_largest_count_fits() -> None:
    keys, counts = add_counts([part(7, 2**62), part(3, 5), part(7, 2**62 - 1)])
    assert (keys.tolist(), counts.tolist()) == ([3, 7], [5, 2**63 - 1])


@pytest.mark.parametrize(
    "numbers", [[2**62, 2**62], [2**63 - 1, 1], [2**63 - 1] * 2, [2**63 - 1] * 3, [2**62] * 5]
)
def test_a_count_over_the_largest_integer_is_an_error(numbers: list[int]) -> None:
    with pytest.raises(CorpusError, match=r"count must lie in 0\.\.2\^63 - 1; got \d\.\d+e\+\d+"):
        add_counts([part(7, number) for number in numbers])


def test_a_negative_count_is_an_error() -> None:
    with pytest.raises(CorpusError, match=r"0\.\.2\^63 - 1; got -3"):
        add_counts([part(7, -3), part(7, 4)])


@settings(max_examples=50)
@given(
    parts=st.lists(
        st.dictionaries(st.integers(0, 5), st.integers(0, 2**60), max_size=5), max_size=6
    )
)
def test_adding_up_equals_python_sums(parts: list[dict[int, int]]) -> None:
    want: Counter[int] = Counter()
    for one in parts:
        want.update(one)
    keys, counts = add_counts(
        (np.array(list(one), np.int64), np.array(list(one.values()), np.int64)) for one in parts
    )
    assert keys.tolist() == sorted(want)
    assert counts.tolist() == [want[key] for key in sorted(want)]


def test_blocks_add_up_to_the_whole(rng: np.random.Generator) -> None:
    segments = rng.integers(0, 5, (12, 17)).astype(np.int64)
    offsets = np.arange(13, dtype=np.int64) * 17
    whole = count_ngrams(segments.reshape(-1), offsets, 3)
    lower: dict[int, np.ndarray] = {}
    for n in ORDERS:
        blocks = [segments[:1], segments[1:5], segments[5:5], segments[5:]]
        keys, support = add_counts(
            local_counts(
                block.reshape(-1),
                np.arange(len(block) + 1, dtype=np.int64) * 17,
                n,
                lower,
                np.zeros(0, np.int64),
            )
            for block in blocks
        )
        lower[n] = keys[support >= 3]
        assert lower[n].tolist() == whole.keys[n].tolist()
        assert support[support >= 3].tolist() == whole.support[n].tolist()


@pytest.mark.parametrize("order", [0, 1, 5])
def test_another_order_is_refused(order: int) -> None:
    ids, offsets = np.arange(9), np.array([0, 9], dtype=np.int64)
    with pytest.raises(RuleSetError, match=f"order must be 2, 3 or 4; got {order}"):
        local_counts(ids, offsets, order, {}, np.zeros(0, np.int64))
