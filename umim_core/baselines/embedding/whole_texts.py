"""Segmenters that cut a whole text into as many units as the merge rules leave of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from umim_core.backbone.backbone import Backbone
from umim_core.baselines.methods import Ints
from umim_core.merging.packing import Segmentation
from umim_core.rules.matcher import Matcher


class WholeTextSegmenter(ABC):
    """Cut texts by something else than rules, at the token reduction of the rules.

    Where a unit ends may depend on the whole text, so a beginning need not have the units that it
    has in the text. Units with a special token, such as a BOS or the mark of a turn, are those of
    the rules, and each stretch between them is cut as a text of its own.
    """

    def __init__(self, backbone: Backbone, matcher: Matcher) -> None:
        self.backbone, self.matcher = backbone, matcher

    def segment(self, ids: NDArray[np.integer]) -> Segmentation:
        """Cut ids [T] into units of 1 to 4 tokens; see ``Segmenter``."""
        starts, of_rules = self.matcher.segment(ids)
        special = np.isin(ids, list(self.backbone.special_ids))
        special_units = np.flatnonzero(np.logical_or.reduceat(special, starts))
        text, borders = np.asarray(ids, dtype=np.int64), np.append(starts, len(ids))
        lengths_of_parts, first = [of_rules[:0]], 0
        for unit in (*special_units.tolist(), len(of_rules)):
            if first < unit:
                stretch = text[borders[first] : borders[unit]]
                lengths_of_parts.append(self.lengths(stretch, of_rules[first:unit]))
            lengths_of_parts.append(of_rules[unit : unit + 1])
            first = unit + 1
        lengths = np.concatenate(lengths_of_parts)
        return np.cumsum(lengths) - lengths, lengths

    @abstractmethod
    def lengths(self, ids: Ints, of_rules: Ints) -> Ints:
        """Return the lengths [S'] of the units of ids [T], given those [S] that rules leave.

        None of the ids is of a special token, and T is at least 1.
        """

    def segment_many(
        self, ids: NDArray[np.integer], offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Cut sequences that lie side by side, each on its own; see ``Segmenter``."""
        none = np.zeros(0, dtype=np.int64)
        starts, lengths, borders = [none], [none], [0]
        for first, last in pairwise(offsets.tolist()):
            inside, sizes = self.segment(ids[first:last])
            starts.append(inside + first)
            lengths.append(sizes)
            borders.append(borders[-1] + len(sizes))
        return np.concatenate(starts), np.concatenate(lengths), np.array(borders, dtype=np.int64)
