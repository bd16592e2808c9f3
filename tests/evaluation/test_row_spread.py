from __future__ import annotations

import numpy as np
import pytest

from umim_core.evaluation.paired_differences import ratio_error


def test_rows_of_one_length_give_the_error_of_their_means() -> None:
    means = np.array([1.0, 2.0, 4.0, 5.0])
    assert ratio_error(8 * means, [8] * 4) == pytest.approx(means.std(ddof=1) / 2)


def test_the_error_is_the_spread_of_the_mean_over_draws_of_rows() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(5, 50, (2000, 40))
    sums = counts * rng.normal(3.0, 1.0, counts.shape)  # a row's tokens share its level
    means = sums.sum(axis=1) / counts.sum(axis=1)
    errors = [ratio_error(s, c) for s, c in zip(sums[:200], counts[:200], strict=True)]
    assert np.mean(errors) == pytest.approx(means.std(), rel=0.06)


@pytest.mark.parametrize("counts", [[], [5], [5, 0]])
def test_a_single_row_has_no_error(counts: list[int]) -> None:
    assert ratio_error([float(count) for count in counts], counts) is None
