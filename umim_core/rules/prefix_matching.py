"""Matching of some parts of a text: rules apply to these tokens, all others stay raw."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Parts = tuple[tuple[int, int], ...]
"""Tokens of a text that may merge, as (first token, end), in order and apart."""


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


def segment_parts(
    segment: Callable[[NDArray[np.integer]], tuple[Ints, Ints]],
    ids: NDArray[np.integer],
    parts: Sequence[tuple[int, int]],
) -> tuple[Ints, Ints]:
    """Cut one sequence into units where rules apply to some parts of it only, each on its own.

    Args:
        segment: Cuts the ids of one part into units.
        ids: Token ids [T].
        parts: Where rules may apply, as (first token, end), in order and apart.

    Returns:
        Starts [S] and lengths [S] (int64).
    """
    starts, lengths, at = [], [], 0
    for first, end in (*parts, (len(ids), len(ids))):
        raw = np.arange(at, first, dtype=np.int64)
        part_starts, part_lengths = segment(ids[first:end])
        starts += [raw, part_starts + first]
        lengths += [np.ones_like(raw), part_lengths]
        at = end
    return np.concatenate(starts), np.concatenate(lengths)


def parts_behind(parts: Parts | None, dropped: int) -> Parts | None:
    """Return the parts of a text whose first tokens were dropped; None for all of it."""
    if parts is None:
        return None
    return tuple((max(0, a - dropped), b - dropped) for a, b in parts if b > dropped)
