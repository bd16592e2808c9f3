"""Points of a curve: one policy at one token reduction, measured on the test rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import Report
from benchmarks.token_reduction.rule_policies import ALL, DAMAGE, EVICTION, POLICIES
from umim_core import UMIM
from umim_core.evaluation.alignment import evaluate_alignment
from umim_core.evaluation.perplexity import PerplexityResult, perplexity
from umim_core.merging.span_eviction import EvictedStates
from umim_core.merging.states import MERGED
from umim_core.rules.damage_table import DamageTable
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

_WITH_ERRORS: Final = ("top1", "kl")
Rows = Sequence[NDArray[np.int32]]


@dataclass(frozen=True)
class Subject:
    """One checkpoint under measurement.

    Attributes:
        umim: Backbone, module and rules.
        base: Perplexity of the backbone alone on the test rows.
        table: Damage of the rules; None where no policy needs it.
    """

    umim: UMIM
    base: PerplexityResult
    table: DamageTable | None

    def measure(self, rules: RuleSet, rows: Rows, batch_size: int, age: int | None) -> Report:
        """Return the quality of some of the rules on the test rows.

        Their spans are merged, or evicted at an age in tokens.
        """
        states = MERGED if age is None else EvictedStates(age)
        compressed = self.umim.compressed.merging_by(Matcher(rules))
        aligned = evaluate_alignment(rows, compressed, batch_size, states).metrics()
        read = perplexity(rows, compressed, batch_size, states)
        nats, error = read.increase_over(self.base)
        ratio = math.exp(nats)
        return {
            "rules": len(rules),
            "token_reduction": aligned["token_reduction"],
            **{x: {"mean": aligned[x], "std": aligned.get(f"{x}_se")} for x in _WITH_ERRORS},
            "ppl": read.ppl,
            "ppl_ratio": {"mean": ratio, "std": None if error is None else ratio * error},
            "alignment": aligned,
        }


def new_points(
    done: Sequence[Report],
    policies: Sequence[str],
    reductions: Sequence[float],
    table: str | None,
    ages: Sequence[int] = (),
) -> Iterator[Report]:
    """Yield policy, target and damage table of every point that is not done; age of an eviction.

    Args:
        done: Points.
        policies: Those wanted.
        reductions: Token reductions wanted.
        table: Digest of the damage table.
        ages: Ages of span eviction wanted.
    """
    wanted = []
    for policy in policies:
        for target in [None] if policy == ALL else reductions:
            of = table if policy == DAMAGE else None
            wanted.append({"policy": policy, "target": target, "table": of})
    wanted += [{"policy": EVICTION, "target": None, "table": None, "age": age} for age in ages]
    for point in wanted:
        if not any(old | point == old for old in done):
            yield point


def by_place(point: Report) -> tuple[int, float]:
    """Return where a point stands: by policy, then by target or age."""
    return (*POLICIES, EVICTION).index(point["policy"]), point["target"] or point.get("age") or 0.0


def in_words(point: Report) -> str:
    """Return a point in words."""
    goal = "" if point["target"] is None else f" {point['target']:.0%}"
    goal += f" at {point['age']} tokens" if "age" in point else ""
    if "unreached" in point:
        return f"{point['policy']}{goal}: not reached, {point['unreached']}"
    shown = f"{point['rules']:,} rules, TR {point['token_reduction']:.2%}"
    quality = f"Top-1 {point['top1']['mean']:.3f}, KL {point['kl']['mean']:.3f}"
    ratio = f"perplexity x{point['ppl_ratio']['mean']:.3f}, {point['seconds']:.0f} s"
    return f"{point['policy']}{goal}: {shown}, {quality}, {ratio}"
