"""Rules of decoding: all rules of a model, or those whose price is under a bound."""

from __future__ import annotations

import math

from umim_core.inference.request import Request
from umim_core.merging.compressed import Compressed
from umim_core.rules.matcher import Matcher
from umim_core.rules.pruning import rules_under


class DecodeRules:
    """Matchers of generated tokens, made of a model's rules; the latest one is kept.

    Args:
        compressed: The model, whose prompts merge by all its rules.
    """

    def __init__(self, compressed: Compressed) -> None:
        self._compressed = compressed
        self._latest: tuple[float, Matcher] | None = None

    def matcher(self, request: Request) -> Matcher | None:
        """Return the matcher of a request's generated tokens; None where they stay raw.

        The request's bound counts; without one, the model's own.

        Raises:
            RuleSetError: If there is a bound and the rules have no prices.
        """
        if request.merge != "all" or self._compressed.matcher is None:
            return None
        whole, asked = self._compressed.require_matcher(), request.decode_max_damage
        bound = self._compressed.decode_max_damage if asked is None else asked
        if bound is None or bound == math.inf:
            return whole
        latest = self._latest  # another thread may replace it
        if latest is None or latest[0] != bound:
            self._latest = latest = bound, Matcher(rules_under(whole.rules, bound))
        return latest[1]
