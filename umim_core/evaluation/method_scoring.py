"""Log-likelihoods of (context, continuation) requests under a baseline, as UMIM's are measured.

By default the budget of a text is UMIM's own: as many tokens, or columns of the KV cache, stay of a
context as the rules leave units of it. Every method is so measured at the same token reduction,
text by text. With a target round(target * T) of the T tokens of a context go. Continuations stay
raw::

    context     the cat sat on the mat      rules leave  [the cat] [sat] [on the] [mat]
    truncation              on the mat      and the token before: 4 of 6
    target 0.5              on the mat      3 of 6

The cue that ends the prompts of a task ("Answer:") stays under every token reducer. A cache
policy scores the first token of a continuation before it drops anything, as a served prompt has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from umim_core.baselines.eviction import score_evicted
from umim_core.baselines.lexical_units import token_texts
from umim_core.baselines.methods import (
    CachePolicy,
    MergedSpans,
    Method,
    ReducedTokens,
    ScoreEndings,
    TargetReduction,
    Text,
    TokenReducer,
    reduce_tokens,
)
from umim_core.config.form import Merge
from umim_core.errors import ConfigError, EvaluationError
from umim_core.evaluation.scoring import (
    UNKNOWN,
    Asked,
    Likelihood,
    Request,
    RequestScorer,
    Scorer,
    Sizes,
)
from umim_core.merging.likelihood import finite_sum
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Parts
from umim_core.store.artifacts import sha256_bytes
from umim_core.text.token_ids import Ints


@dataclass
class _BaselineScorer(RequestScorer):
    umim: Scorer

    @property
    def merged_model(self) -> MergedModel:
        return self.umim.merged_model

    @property
    def max_units(self) -> int:
        return self.umim.max_units

    def equal_saving(self, tokens: int, units: int) -> int:
        """Return how many of so many tokens stay at the saving of so many units."""
        return tokens - round((tokens - units) * self.merged_model.saved_share)


@dataclass
class ReducedScorer(_BaselineScorer):
    """Score requests whose contexts a token reducer has cut down.

    A BOS in front, the cue and the raw tail are protected. ``umim`` gives the backbone, and the
    token reduction where ``target`` is None.
    """

    reducer: TokenReducer
    target: TargetReduction | None = None

    def forwards(
        self, requests: Sequence[Request], batch_size: int
    ) -> Iterator[dict[int, Likelihood]]:
        shortened: dict[tuple[bytes, Asked, Parts | None], tuple[Ints, Sizes]] = {}
        reduced, sizes = [], []
        for request in requests:
            new = len(request.continuation)
            room = self.max_units - new + 1
            context, budget = self.fit(request.context, room, request.parts)
            key = context.tobytes(), request.asked, request.parts
            if key not in shortened:  # the answers of a question share their context
                shortened[key] = self.shorten(context, budget, request.asked)
            ids, size = shortened[key]
            sizes.append(size + Sizes(new, new))
            reduced.append(Request(ids, request.continuation))
        base = Scorer(self.merged_model.base(), "prompt", self.max_units)
        for done in base.forwards(reduced, batch_size):
            yield {number: replace(score, sizes=sizes[number]) for number, score in done.items()}

    def fit(self, ids: Ints, room: int, parts: Parts | None = None) -> tuple[Ints, int]:
        """Drop leading ids beyond the room of what stays; return the others and their budget.

        Args:
            ids: Raw ids [T].
            room: Tokens that may stay.
            parts: Where the rules that give the budget apply; None for everywhere.
        """
        if self.target is not None:
            return self.target.fit(ids, room)
        fitting, units = self.umim.fit(ids, room, parts)
        return fitting, min(room, self.equal_saving(len(fitting), units))

    def shorten(self, ids: Ints, budget: int, asked: Asked = UNKNOWN) -> tuple[Ints, Sizes]:
        """Reduce the tokens of a context [T] to a budget of those that stay; return its sizes, too.

        The cue of what it asks is protected; a reducer that needs a question takes the end of the
        context where none is known.
        """
        protected = np.arange(len(ids)) >= len(ids) - self.merged_model.raw_tail
        protected[0] |= int(ids[0]) in self.merged_model.backbone.special_ids
        backbone = self.merged_model.backbone
        if asked.cue:
            protected |= _from_cue(token_texts(ids, backbone.require_tokenizer()), asked.cue)
        question = backbone.encode(asked.question) if asked.question else []
        text = Text(ids, protected, np.array(question, dtype=np.int64))
        reduction = reduce_tokens(self.reducer, text, budget)
        tokens, stayed = len(ids), len(reduction.kept)
        size = Sizes(tokens, stayed, tokens, stayed, shortfall=reduction.shortfall)
        return ids[reduction.kept], size


def _from_cue(texts: list[str], cue: str) -> NDArray[np.bool_]:
    """Return which tokens [T] hold the last place of a cue in their text, or stand behind it."""
    place = "".join(texts).rfind(cue.strip())
    ends = np.cumsum([len(text) for text in texts])
    return ends > place if place >= 0 else np.zeros(len(texts), dtype=bool)


@dataclass
class EvictedScorer(_BaselineScorer):
    """Score requests on a KV cache whose columns a policy chooses, one context after the other.

    Attributes:
        new_policy: Makes the policy of a context, given its raw ids.
        target: Share of each context's columns that go; None for the token reduction of the rules.
        age: Age at which spans leave the cache; None of other policies.
        score_endings: Scores likelihoods in another way; None: columns go behind the context.
    """

    new_policy: Callable[[Ints], CachePolicy]
    target: TargetReduction | None = None
    age: int | None = None
    score_endings: ScoreEndings | None = None
    total: Sizes = field(default_factory=lambda: Sizes(columns=0), kw_only=True)

    def budget(self, context: Ints, generated: int = 0, parts: Parts | None = None) -> int:
        """Return how many columns may stay of a context and of generated tokens behind it.

        A target is one of all these tokens together. The rules leave the columns of the context
        that merging leaves at its saving, and generated tokens stay raw.
        """
        if self.target is not None:
            return self.target.stays(len(context) + generated)
        units = len(self.merged_model.segment_prompt(context, parts)[0])
        return self.equal_saving(len(context), units) + generated

    def forwards(
        self, requests: Sequence[Request], batch_size: int
    ) -> Iterator[dict[int, Likelihood]]:
        groups: dict[tuple[bytes, Parts | None], list[int]] = {}
        for index, request in enumerate(requests):
            room = self.max_units - len(request.continuation) + 1
            if room < 1:
                raise EvaluationError(
                    f"context and continuation must fit {self.max_units} tokens",
                    f"{len(request.continuation)} tokens of a continuation",
                    "Shorten it, or use a backbone with more positions.",
                )
            context = request.context[-room:]
            key = context.tobytes(), request.parts_of_last(len(context))
            groups.setdefault(key, []).append(index)
        for key, members in groups.items():
            context = np.frombuffer(key[0], dtype=np.int64).copy()
            endings = [requests[index].continuation for index in members]
            budget = self.budget(context, parts=key[1])
            backbone = self.merged_model.backbone
            if self.score_endings is None:
                scores, columns = score_evicted(context, endings, backbone, self.new_policy, budget)
            else:
                scores = self.score_endings(context, endings, backbone, budget)
                columns = budget
            done: dict[int, Likelihood] = {}
            for index, score in zip(members, scores, strict=True):
                new, over = len(requests[index].continuation), max(0, columns - budget)
                size = evicted_sizes(len(context), new, columns, over)
                greedy = bool(score.greedy.all())
                done[index] = Likelihood(finite_sum(score.log_probs), greedy, size)
            yield done


def evicted_sizes(tokens: int, new: int, columns: int, over: int) -> Sizes:
    """Return the sizes of a context that was read whole."""
    return Sizes(tokens + new, tokens + new, tokens, tokens, columns, over)


AnyScorer = Scorer | ReducedScorer | EvictedScorer


def method_scorer(
    method: Method, merged_model: MergedModel, max_units: int, target: TargetReduction | None = None
) -> AnyScorer:
    """Return what scores requests under a baseline, in the place of a checkpoint's module.

    ``target`` is the token reduction of each context; None for that of the checkpoint's rules.
    ``max_units`` is the longest sequence that the model takes.
    """
    if isinstance(method, MergedSpans):
        if target is not None:
            raise ConfigError(
                "target_tr needs a method that drops tokens or columns",
                f"{target.target} of one that merges the spans of the rules",
                "Leave it out, or cut the rules: umim prune --target-tr.",
            )
        module = merged_model.module if method.merger is None else method.merger
        # A checkpoint's bound on damage is one on its own rules and module: the baseline has none.
        merged_model = replace(
            merged_model, module=module, matcher=method.segmenter, decode_max_damage=None
        )
        return Scorer(merged_model, "prompt", max_units)
    umim = Scorer(merged_model, "prompt", max_units)
    if isinstance(method, ReducedTokens):
        return ReducedScorer(umim, method.reducer, target)
    return EvictedScorer(umim, method.new_policy, target, method.age, method.score)


Identity = dict[str, str | int | float | None]


def answer_identity(
    merged_model: MergedModel, merge: Merge, method: str | None, target: TargetReduction | None
) -> Identity:
    """Return what decides the answers of a model, for result files and as the key of a cache.

    With ``merge`` ``none``, module and rules are None. A baseline ``method`` stands in the module's
    place; its ``target`` is not named where it is the token reduction of the rules.
    """
    backbone = merged_model.backbone
    rules = None if merge == "none" else merged_model.require_matcher().rules
    prices = None if rules is None else rules.prices
    return {
        "backbone": backbone.name,
        "backbone_fingerprint": backbone.fingerprint,
        "tokenizer_fingerprint": backbone.tokenizer_fingerprint,
        "module_digest": None if rules is None else merged_model.require_module().digest(),
        "rules_digest": None if rules is None else rules.digest,
        "prices_digest": None if prices is None else sha256_bytes(prices.tobytes()),
        "dtype": str(backbone.dtype),
        "merge": merge,
        "unit_positions": None if rules is None else merged_model.unit_positions,
        "raw_tail": merged_model.raw_tail,
        "method": method or "umim",
        **({} if target is None else {"target_tr": target.target}),
    }


def named_method(name: str | None, own: str | None) -> str | None:
    """Return a baseline's name, with the model of its own (name@commit) that it chooses by."""
    return name if own is None else f"{name} ({own})"
