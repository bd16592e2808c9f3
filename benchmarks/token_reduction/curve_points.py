"""Points of a curve: one policy at one token reduction, measured on the test rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import Report
from benchmarks.token_reduction.rule_policies import ALL, DAMAGE, EVICTION, POLICIES
from umim_core import UMIM
from umim_core.baselines.evicted_spans import evicted_spans
from umim_core.evaluation.alignment import evaluate_alignment
from umim_core.evaluation.method_scoring import method_scorer
from umim_core.evaluation.perplexity import (
    PerplexityResult,
    perplexity,
    second_half_perplexity,
)
from umim_core.evaluation.scoring import Scorer
from umim_core.merging.compressed import Compressed
from umim_core.merging.span_eviction import EvictedStates
from umim_core.merging.states import MERGED
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

_WITH_ERRORS: Final = ("top1", "kl")
Rows = Sequence[NDArray[np.int32]]


@dataclass(frozen=True)
class Subject:
    """One checkpoint under measurement.

    Attributes:
        umim: Backbone, module and rules.
        rows: The test rows.
        batch_size: Rows per forward.
    """

    umim: UMIM
    rows: Rows
    batch_size: int

    @cached_property
    def _base(self) -> PerplexityResult:
        """Perplexity of the backbone alone."""
        return perplexity(self.rows, self.umim.compressed.base(), self.batch_size)

    @cached_property
    def _base_of_halves(self) -> PerplexityResult:
        """Perplexity of second halves by the backbone alone, which reads the first ones raw."""
        scorer = Scorer(self.umim.compressed.base(), "prompt", self._longest)
        return second_half_perplexity(self.rows, scorer, self.batch_size)

    @property
    def _longest(self) -> int:
        return max(map(len, self.rows))

    def base_of(self, point: Report) -> PerplexityResult:
        """Return what the backbone alone makes of a point's text: whole rows, or second halves."""
        return self._base_of_halves if "raw_tail" in point else self._base

    def measure(self, rules: RuleSet, point: Report) -> Report:
        """Return what a point shows of some of the rules.

        Args:
            rules: Their spans are merged; with an age in the point they are evicted.
            point: With a raw tail it is one of second halves.
        """
        compressed = self.umim.compressed.merging_by(Matcher(rules))
        read = self._halves if "raw_tail" in point else self._whole
        return {"rules": len(rules)} | read(compressed, point)

    def _whole(self, compressed: Compressed, point: Report) -> Report:
        """Return the quality of rows that are shortened as a whole."""
        states = EvictedStates(point["age"]) if "age" in point else MERGED
        aligned = evaluate_alignment(self.rows, compressed, self.batch_size, states).metrics()
        read = perplexity(self.rows, compressed, self.batch_size, states)
        return {
            "token_reduction": aligned["token_reduction"],
            **{x: {"mean": aligned[x], "std": aligned.get(f"{x}_se")} for x in _WITH_ERRORS},
            **_against(read, self.base_of(point)),
            "alignment": aligned,
        }

    def _halves(self, compressed: Compressed, point: Report) -> Report:
        """Return the perplexity of raw second halves behind first ones that are shortened."""
        if "age" in point:
            policy = evicted_spans(compressed.require_matcher(), point["age"])
            scorer = method_scorer(policy, compressed, self._longest)
        else:
            prompts = compressed.reading("prompt", point["raw_tail"])
            scorer = Scorer(prompts, "prompt", self._longest)
        read = second_half_perplexity(self.rows, scorer, self.batch_size)
        held = scorer.held
        return {"token_reduction": held.token_reduction, **_against(read, self.base_of(point))}


def _against(read: PerplexityResult, base: PerplexityResult) -> Report:
    nats, error = read.increase_over(base)
    ratio = math.exp(nats)
    spread = None if error is None else ratio * error
    return {"ppl": read.ppl, "ppl_ratio": {"mean": ratio, "std": spread}}


def new_points(
    done: Sequence[Report],
    policies: Sequence[str],
    reductions: Sequence[float],
    table: str | None,
    ages: Sequence[int] = (),
    raw_tails: Sequence[int | None] = (None,),
) -> Iterator[Report]:
    """Yield policy, target and damage table of every point that is not done.

    Args:
        done: Points.
        policies: Those wanted.
        reductions: Token reductions wanted.
        table: Digest of the damage table.
        ages: Ages of span eviction wanted.
        raw_tails: Raw tails of first halves wanted; None for rows as a whole. A first half whose
            spans are evicted has none.
    """
    wanted: list[Report] = []
    for policy in policies:
        for target in [None] if policy == ALL else reductions:
            of = table if policy == DAMAGE else None
            for tail in raw_tails:
                point = {"policy": policy, "target": target, "table": of}
                wanted.append(point | ({} if tail is None else {"raw_tail": tail}))
    if raw_tails:
        raw = {} if None in raw_tails else {"raw_tail": 0}
        evicted = {"policy": EVICTION, "target": None, "table": None} | raw
        wanted += [evicted | {"age": age} for age in ages]
    for point in wanted:
        if not any(old | point == old for old in done):
            yield point


def by_place(point: Report) -> tuple[int, float, int]:
    """Return where a point stands: by policy, then by target or age, then by raw tail."""
    policy = (*POLICIES, EVICTION).index(point["policy"])
    return policy, point["target"] or point.get("age") or 0.0, point.get("raw_tail", 0)


def in_words(point: Report) -> str:
    """Return a point in words."""
    goal = "" if point["target"] is None else f" {point['target']:.0%}"
    goal += f" at {point['age']} tokens" if "age" in point else ""
    if "raw_tail" in point:
        goal += f", second halves, raw tail {point['raw_tail']}"
    if "unreached" in point:
        return f"{point['policy']}{goal}: not reached, {point['unreached']}"
    shown = f"{point['rules']:,} rules, TR {point['token_reduction']:.2%}"
    if "top1" in point:
        shown += f", Top-1 {point['top1']['mean']:.3f}, KL {point['kl']['mean']:.3f}"
    ratio = f"perplexity x{point['ppl_ratio']['mean']:.3f}, {point['seconds']:.0f} s"
    return f"{point['policy']}{goal}: {shown}, {ratio}"
