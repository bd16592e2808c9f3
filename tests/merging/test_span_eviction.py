"""The last token that sees the column of an old span."""

from __future__ import annotations

import numpy as np
import pytest

from umim_core.errors import ConfigError
from umim_core.merging.span_eviction import check_age, last_queries

NEVER = np.iinfo(np.int64).max


def test_the_worked_example() -> None:
    cut = np.array([0, 1, 3, 6]), np.array([1, 2, 3, 1])
    assert last_queries(cut, 1).tolist() == [NEVER, 4, NEVER, 6, 6, NEVER, NEVER]
    assert last_queries(cut, 1, certain=0).tolist() == [NEVER, 3, NEVER, 6, 6, NEVER, NEVER]


def test_the_first_token_of_a_text_keeps_its_column() -> None:
    cut = np.array([0, 3]), np.array([3, 2])
    assert last_queries(cut, 0, certain=0).tolist() == [NEVER, 2, NEVER, 4, NEVER]


@pytest.mark.parametrize("age", [-1, 1.5, True, None])
def test_an_age_that_is_none_is_refused(age: object) -> None:
    with pytest.raises(ConfigError, match="the age at which spans are evicted must be an integer"):
        check_age(age)
