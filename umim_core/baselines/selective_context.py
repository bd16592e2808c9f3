"""Selective Context: the units of a text with the least self-information are deleted.

A worked example, in units of two tokens and with a budget of 3 of 6::

    self-information   4  1   2  1   3  3
    of the unit        5 5    3 3    6 6      a unit has the sum of its tokens'
    kept               0             4  5     the unit at the border keeps its beginning

Source: Li et al., "Compressing Context to Enhance Inference Efficiency of Large Language Models"
(EMNLP 2023). Differences: docs/baselines.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from umim_core.backbone.backbone import Backbone
from umim_core.baselines.lexical_units import Unit, lexical_units
from umim_core.baselines.methods import BASELINES, Ints, ReducedTokens, Text
from umim_core.baselines.reduction import highest
from umim_core.baselines.self_information import self_information
from umim_core.rules.matcher import Matcher


@dataclass(frozen=True)
class SelectiveContext:
    """Keep the units with the most self-information."""

    exact: ClassVar[bool] = True
    scorer: Backbone
    unit: Unit = "token"

    def keep(self, text: Text, budget: int) -> Ints:
        """Return the indices [budget] of the tokens that stay; see ``TokenReducer``."""
        unit_of = lexical_units(text.ids, self.unit, self.scorer)
        sums = np.zeros(int(unit_of[-1]) + 1)
        np.add.at(sums, unit_of, self_information(text.ids, self.scorer))
        return highest(sums[unit_of], text.protected, budget)


@BASELINES.add("selective-context")
def tokens(backbone: Backbone, matcher: Matcher) -> ReducedTokens:
    """Delete the tokens with the least self-information under the backbone."""
    return ReducedTokens(SelectiveContext(backbone))


@BASELINES.add("selective-context-phrase")
def phrase_units(backbone: Backbone, matcher: Matcher) -> ReducedTokens:
    """Delete the phrases with the least self-information under the backbone."""
    return ReducedTokens(SelectiveContext(backbone, "phrase"))


@BASELINES.add("selective-context-sentence")
def sentence_units(backbone: Backbone, matcher: Matcher) -> ReducedTokens:
    """Delete the sentences with the least self-information under the backbone."""
    return ReducedTokens(SelectiveContext(backbone, "sentence"))
