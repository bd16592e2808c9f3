"""MAUVE of a set of texts against a set of references with given features, by mauve-text.

The features of both sets are clustered together, and MAUVE is the area under the divergence curve
of the two histograms over the clusters. Its authors advise thousands of texts; of fewer it depends
on the number of texts and of clusters, and is to be compared within one table alone.

Source: Pillutla et al., 2021, "MAUVE: Measuring the Gap Between Neural Text and Human Text".
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import EvaluationError, MissingExtraError

MAUVE: Final = "mauve_stand_in_features"
FEWEST_TEXTS: Final = 20  # two clusters of ten, the library's own least
_SEED: Final = 25  # of the clusters' first centres; the library's own

Features = NDArray[np.floating]


def mauve_buckets(references: int) -> int:
    """Return the number of clusters: a tenth of the references, however many texts are empty.

    The library's own choice is a tenth of the smaller set, which would differ between sets of texts
    that are compared with the same references.
    """
    return max(2, round(references / 10))


def mauve(texts: Features, references: Features) -> float:
    """Return MAUVE of two sets of texts, 0..1; larger is nearer. The same sets give the same value.

    Args:
        texts: A feature vector per text [n, d]; MAUVE's own are the last token's.
        references: A feature vector per reference [m, d], which decide the number of clusters.

    Raises:
        EvaluationError: If there are fewer than `FEWEST_TEXTS` of either.
        MissingExtraError: If mauve-text is not installed.
    """
    if min(len(texts), len(references)) < FEWEST_TEXTS:
        raise EvaluationError(
            f"MAUVE needs at least {FEWEST_TEXTS} texts and as many references",
            f"{len(texts)} and {len(references)}",
            "Generate from more prompts.",
        )
    result = _compute_mauve()(
        p_features=references,
        q_features=texts,
        num_buckets=mauve_buckets(len(references)),
        seed=_SEED,
    )
    return float(result.mauve)


def require_mauve() -> None:
    """Make sure that mauve-text is installed.

    Raises:
        MissingExtraError: If it is not.
    """
    _compute_mauve()


def _compute_mauve() -> Any:
    try:
        from mauve import compute_mauve
    except ImportError as error:
        raise MissingExtraError(
            "MAUVE needs mauve-text", str(error), "pip install 'umim[metrics]'"
        ) from error
    return compute_mauve
