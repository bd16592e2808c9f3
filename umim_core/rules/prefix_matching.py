"""Matching of a text's beginning: rules apply to its first tokens, the others stay raw."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def segment_prefix(
    segment: Callable[[NDArray[np.integer]], tuple[Ints, Ints]],
    ids: NDArray[np.integer],
    mergeable: int,
) -> tuple[Ints, Ints]:
    """Cut one sequence into units where rules apply to its first tokens only.

    Args:
        segment: Cuts ids into units, as ``Matcher.segment``.
        ids: Token ids [T].
        mergeable: Leading tokens open to merging, 0 .. T; the others stay raw.

    Returns:
        Starts [S] and lengths [S] (int64).
    """
    starts, lengths = segment(ids[:mergeable])
    raw = np.arange(mergeable, len(ids), dtype=np.int64)
    return np.concatenate([starts, raw]), np.concatenate([lengths, np.ones_like(raw)])
