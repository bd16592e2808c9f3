"""Rules of decoding: all rules of a model, or those whose price is under a bound."""

from __future__ import annotations

import math

from umim_core.inference.request import Request
from umim_core.merging.compressed import Compressed
from umim_core.rules.matcher import Matcher
from umim_core.rules.pruning import rules_under


def decode_bound(request: Request, compressed: Compressed) -> float | None:
    """Return the most price of the rules that a request's generated tokens merge by.

    The request's bound counts; without one, the model's own. None where all rules count, or
    generated tokens stay raw.
    """
    if request.merge != "all" or compressed.matcher is None:
        return None
    asked = request.decode_max_damage
    bound = compressed.decode_max_damage if asked is None else asked
    return None if bound == math.inf else bound


class DecodeRules:
    """Matchers of generated tokens, made of a model's rules; the latest one is kept."""

    def __init__(self, compressed: Compressed) -> None:
        self._compressed = compressed
        self._latest: tuple[float, Matcher] | None = None

    def matcher(self, request: Request) -> Matcher | None:
        """Return the matcher of a request's generated tokens; None where they stay raw.

        Raises:
            RuleSetError: If there is a bound and the rules have no prices.
        """
        if request.merge != "all" or self._compressed.matcher is None:
            return None
        whole, bound = self._compressed.require_matcher(), decode_bound(request, self._compressed)
        if bound is None:
            return whole
        latest = self._latest  # another thread may replace it
        if latest is None or latest[0] != bound:
            self._latest = latest = bound, Matcher(rules_under(whole.rules, bound))
        return latest[1]
