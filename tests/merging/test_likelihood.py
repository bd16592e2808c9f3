"""Rows that cannot be scored; what scores must be is in ``evaluation/test_perplexity.py``."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from umim_core.backbone import Backbone
from umim_core.errors import EvaluationError
from umim_core.merging.likelihood import score_rows

FINE = np.array([1, 2, 3])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (np.array([1, 32, 2]), "ids must lie between 0 and 31; got row 1: 32. Encode"),
        (np.array([1, -1, 2]), "ids must lie between 0 and 31; got row 1: -1. Encode"),
        (np.array([1, 2**40]), "got row 1: 1099511627776"),
        (np.array([1.5, 2.0]), r"1-D array of integers; got row 1: shape \(2,\), float64"),
        (np.array([True, False]), "got row 1: shape .*, bool"),
        (np.array([[1, 2], [3, 4]]), r"got row 1: shape \(2, 2\), int64"),
        (np.array([]), "at least one token; got .3, 0."),
    ],
)
def test_a_row_that_is_not_ids_is_refused(
    tiny_backbone: Backbone, row: NDArray[np.integer], message: str
) -> None:
    with pytest.raises(EvaluationError, match=message):
        score_rows([FINE, row], tiny_backbone, None, None)


def test_the_first_and_the_last_id_are_ids(tiny_backbone: Backbone) -> None:
    (scores,) = score_rows([np.array([0, 31], dtype=np.uint16)], tiny_backbone, None, None)
    assert scores.log_probs.shape == (1,)
