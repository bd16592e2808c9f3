"""Random spans: units as long as those of the rules, at random places, merged by the same module.

It shows what the choice of spans is worth: token reduction, lengths of spans and the merge module
are those of the checkpoint. Of the units that the rules leave of a text, the order is drawn::

    rules     [the cat] [sat] [on the mat] [.]       lengths 2 1 3 1
    random    [the] [cat sat on] [the] [mat .]       lengths 1 3 1 2

The draw is that of the text: the same ids have the same units.
"""

from __future__ import annotations

import hashlib

import numpy as np

from umim_core.backbone.backbone import Backbone
from umim_core.baselines.embedding.whole_texts import WholeTextSegmenter
from umim_core.baselines.methods import BASELINES, Ints, MergedSpans
from umim_core.rules.matcher import Matcher


class RandomSpans(WholeTextSegmenter):
    """Put the units of the rules into a random order."""

    def lengths(self, ids: Ints, of_rules: Ints) -> Ints:
        """Return the lengths [S] of the rules in an order that the ids [T] draw."""
        seed = hashlib.sha256(ids.tobytes()).digest()
        return np.random.default_rng(list(seed)).permutation(of_rules)


@BASELINES.add("random-spans")
def random_spans(backbone: Backbone, matcher: Matcher) -> MergedSpans:
    """Merge random spans, as many and as long as those of the rules, by the checkpoint's module."""
    return MergedSpans(RandomSpans(backbone, matcher), None)
