"""Rolling log-likelihoods of whole texts: cut into windows, added up as soon as a text is done.

::

    text of 7 tokens, windows of 3     [0 1 2] [3 4 5] [6]     each token scored once, the first
                                                               after the prefix token
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from umim_core.evaluation.scored_requests import Likelihood, Sizes
from umim_core.evaluation.tasks.batched_model import TokenRequest


class RollingTexts:
    """Texts as windows to score, as lm-eval's ``hf`` cuts them.

    Attributes:
        windows: Context and continuation of every window, text by text.
    """

    def __init__(self, texts: Sequence[Sequence[int]], prefix: int, longest: int) -> None:
        self.windows: list[TokenRequest] = []
        self._owners: list[int] = []  # text of each window
        self._scores: list[dict[int, Likelihood]] = [{} for _ in texts]  # by window
        self._left: list[int] = []  # windows of each text without a score
        for number, ids in enumerate(texts):
            pairs = list(get_rolling_token_windows(ids, prefix, longest, 1))
            self.windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
            self._owners += [number] * len(pairs)
            self._left.append(len(pairs))

    def add(self, done: Mapping[int, Likelihood]) -> Iterator[tuple[int, Likelihood]]:
        """Take scores of windows; yield number and score of every text that they complete."""
        for window, score in done.items():
            number = self._owners[window]
            self._scores[number][window] = score
            self._left[number] -= 1
            if self._left[number] == 0:
                yield number, self.score(number)

    def score(self, number: int) -> Likelihood:
        """Return the sum over the windows of a text, in their order whatever they came in."""
        scores = [score for _, score in sorted(self._scores[number].items())]
        return Likelihood(
            sum(score.log_prob for score in scores),
            all(score.greedy for score in scores),
            sum((score.sizes for score in scores), Sizes()),
        )
