"""MAUVE of drawn feature sets, and the sets that it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from umim_core.errors import EvaluationError
from umim_core.evaluation.text_metrics.reference_similarity import FEWEST_TEXTS, mauve


def drawn(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)


@pytest.mark.full  # mauve-text imports scikit-learn
def test_it_is_high_for_one_distribution_low_for_two_and_the_same_again() -> None:
    pytest.importorskip("mauve", reason="mauve-text is the `metrics` extra")
    first, again = drawn(60, 1), drawn(60, 2)
    assert mauve(first, first) == pytest.approx(1.0, abs=1e-3)
    near = mauve(first, again)
    # Features are scaled to length 1: another distribution is one of other directions.
    assert near > 0.8 and mauve(first, again + 50) < 0.1
    assert mauve(first, again) == near


def test_too_few_texts_are_refused() -> None:
    enough, few = drawn(FEWEST_TEXTS, 1), drawn(FEWEST_TEXTS - 1, 1)
    for pair in ((enough, few), (few, enough)):
        with pytest.raises(EvaluationError, match="at least 20 texts and as many references"):
            mauve(*pair)
