"""Log-likelihoods of (context, continuation) requests under a baseline, as UMIM's are measured.

The budget of a text is UMIM's own: as many tokens, or columns of the KV cache, stay of a context as
the rules leave units of it. Every method is so measured at the same token reduction, text by text;
continuations stay raw::

    context     the cat sat on the mat      rules leave  [the cat] [sat] [on the] [mat]
    truncation              on the mat      and the token before: 4 of 6
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from umim_core.baselines.eviction import score_evicted
from umim_core.baselines.methods import (
    CachePolicy,
    Ints,
    MergedSpans,
    Method,
    ReducedTokens,
    Text,
    TokenReducer,
)
from umim_core.baselines.reduction import reduce_tokens
from umim_core.errors import EvaluationError
from umim_core.evaluation.scored_requests import (
    Finished,
    Likelihood,
    Request,
    Sizes,
    Tally,
    check_requests,
    count_sizes,
    ignore_finished,
)
from umim_core.evaluation.scoring import Scorer
from umim_core.merging.compressed import Compressed
from umim_core.merging.likelihood import finite_sum

_UNASKED: Final = np.zeros(0, dtype=np.int64)


@dataclass
class ReducedScorer:
    """Score requests whose contexts a token reducer has cut down.

    Args:
        umim: Gives the budget, and the backbone.
        reducer: Chooses the tokens that stay; a BOS in front is protected.

    Attributes:
        contexts: Tokens of the contexts, and those that stayed.
        inputs: The same of contexts and continuations together.
    """

    umim: Scorer
    reducer: TokenReducer
    contexts: Tally = field(default_factory=Tally)
    inputs: Tally = field(default_factory=Tally)

    def score(
        self,
        requests: Sequence[Request],
        batch_size: int,
        finished: Finished = ignore_finished,
    ) -> list[Likelihood]:
        """Score requests; see ``Scorer.score``."""
        check_requests(requests, batch_size)
        kept: dict[bytes, Ints] = {}
        reduced, sizes = [], []
        for request in requests:
            new = len(request.continuation)
            context, units = self.umim.fit(request.context, self.umim.max_units - new + 1)
            key = context.tobytes()
            if key not in kept:  # the answers of a question share their context
                kept[key] = self._reduce(context, units)
            stayed = len(kept[key])
            sizes.append(Sizes(len(context) + new, stayed + new, len(context), stayed))
            count_sizes(sizes[-1], self.inputs, self.contexts)
            reduced.append(Request(kept[key], request.continuation))
        base = Scorer(self.umim.compressed.base(), "prompt", self.umim.max_units)
        results: dict[int, Likelihood] = {}

        def keep(done: Mapping[int, Likelihood]) -> None:
            whole = {number: replace(score, sizes=sizes[number]) for number, score in done.items()}
            results.update(whole)
            finished(whole)

        base.score(reduced, batch_size, keep)
        return [results[number] for number in range(len(requests))]

    def _reduce(self, ids: Ints, budget: int) -> Ints:
        protected = np.zeros(len(ids), dtype=bool)
        protected[0] = int(ids[0]) in self.umim.compressed.backbone.special_ids
        return ids[reduce_tokens(self.reducer, Text(ids, protected, _UNASKED), budget).kept]


@dataclass
class EvictedScorer:
    """Score requests on a KV cache whose columns a policy chooses after the context.

    Args:
        umim: Gives the budget, and the backbone.
        new_policy: Makes the policy of a context, given its raw ids.

    Attributes:
        contexts: Tokens of the contexts; all of them are read.
        inputs: The same of contexts and continuations together.
        columns: Tokens of the contexts, and columns of a layer's cache that stayed.
    """

    umim: Scorer
    new_policy: Callable[[Ints], CachePolicy]
    contexts: Tally = field(default_factory=Tally)
    inputs: Tally = field(default_factory=Tally)
    columns: Tally = field(default_factory=Tally)

    def score(
        self,
        requests: Sequence[Request],
        batch_size: int,
        finished: Finished = ignore_finished,
    ) -> list[Likelihood]:
        """Score requests, one context after the other; see ``Scorer.score``."""
        check_requests(requests, batch_size)
        compressed = self.umim.compressed
        groups: dict[bytes, list[int]] = {}
        for index, request in enumerate(requests):
            room = self.umim.max_units - len(request.continuation) + 1
            if room < 1:
                raise EvaluationError(
                    f"context and continuation must fit {self.umim.max_units} tokens",
                    f"{len(request.continuation)} tokens of a continuation",
                    "Shorten it, or use a backbone with more positions.",
                )
            groups.setdefault(request.context[-room:].tobytes(), []).append(index)
        results: dict[int, Likelihood] = {}
        for key, members in groups.items():
            context = np.frombuffer(key, dtype=np.int64).copy()
            endings = [requests[index].continuation for index in members]
            budget = len(compressed.segment_prompt(context)[0])
            scores, columns = score_evicted(
                context, endings, compressed.backbone, self.new_policy, budget
            )
            done: dict[int, Likelihood] = {}
            for index, score in zip(members, scores, strict=True):
                whole = len(context) + len(requests[index].continuation)
                size = Sizes(whole, whole, len(context), len(context), columns)
                count_sizes(size, self.inputs, self.contexts, self.columns)
                greedy = bool(score.greedy.all())
                done[index] = Likelihood(finite_sum(score.log_probs), greedy, size)
            results |= done
            finished(done)
        return [results[index] for index in range(len(requests))]


AnyScorer = Scorer | ReducedScorer | EvictedScorer


def method_scorer(method: Method, compressed: Compressed, max_units: int) -> AnyScorer:
    """Return what scores requests under a baseline.

    Args:
        method: The baseline.
        compressed: The checkpoint in whose place it stands; its rules give the budgets.
        max_units: Longest sequence that the model takes; see ``Scorer``.
    """
    if isinstance(method, MergedSpans):
        return Scorer(merged_by(method, compressed), "prompt", max_units)
    umim = Scorer(compressed, "prompt", max_units)
    if isinstance(method, ReducedTokens):
        return ReducedScorer(umim, method.reducer)
    return EvictedScorer(umim, method.new_policy)


def merged_by(method: MergedSpans, compressed: Compressed) -> Compressed:
    """Return the same backbone, its spans cut and merged by a baseline.

    A checkpoint's bound on damage is one on its own rules and module: the baseline has none.
    """
    return replace(
        compressed, module=method.merger, matcher=method.segmenter, decode_max_damage=None
    )
