"""Token-level perplexity of compressed text over all raw targets.

PPL = exp(-sum of log p(target) / number of targets), every target predicted from the state that
decoding passes through (``merging.likelihood``): a likelihood under every rule set. Base and
compressed perplexity divide by the same targets and can stand in one table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from umim_core.errors import EvaluationError, require
from umim_core.evaluation.scoring import Request, RequestScorer
from umim_core.evaluation.standard_errors import ratio_error
from umim_core.merging.likelihood import finite_sum, score_rows
from umim_core.merging.merged_model import MergedModel
from umim_core.text.token_ids import AnyInts


@dataclass(frozen=True)
class PerplexityResult:
    row_sums: tuple[float, ...]  # negative log-probability (nats) of each window
    row_targets: tuple[int, ...]  # predicted raw tokens of each
    token_reduction: float  # (raw tokens - units) / raw tokens over all that was compressed

    def __post_init__(self) -> None:
        rule, remedy = "there must be at least one target token", "Give windows of more tokens."
        require(self.targets > 0, EvaluationError, rule, "none", remedy)

    @property
    def nll_sum(self) -> float:
        return sum(self.row_sums)

    @property
    def targets(self) -> int:
        return sum(self.row_targets)

    @property
    def ppl(self) -> float:
        return float(np.exp(self.nll_sum / self.targets))

    @property
    def nats_error(self) -> float | None:
        """Standard error over the windows of ln ppl; None for a single one."""
        return ratio_error(self.row_sums, self.row_targets)

    def bits_per_byte(self, size: int) -> float:
        """Return the negative log-probability in bits over the bytes of the predicted text."""
        return self.nll_sum / math.log(2) / size if size else math.nan

    def increase_over(self, other: PerplexityResult) -> tuple[float, float | None]:
        """Return ln(ppl / ppl of another model) on the same windows, with its paired error."""
        steps = [own - theirs for own, theirs in zip(self.row_sums, other.row_sums, strict=True)]
        return sum(steps) / self.targets, ratio_error(steps, self.row_targets)


def perplexity(
    segments: Sequence[AnyInts],
    merged_model: MergedModel,
    batch_size: int = 8,
    given: Sequence[int] | None = None,
) -> PerplexityResult:
    """Compute token-level perplexity of windows of raw ids [T_b], each scored on its own.

    The first ``given`` tokens of a window, 1 if None, are not scored. The token reduction is one of
    the cache's columns where the states are not of merging.
    """
    sums: list[float] = []
    targets: list[int] = []
    raw = units = 0
    for first in range(0, len(segments), batch_size):
        rows = segments[first : first + batch_size]
        leading = None if given is None else given[first : first + batch_size]
        for scores in score_rows(rows, merged_model, leading):
            sums.append(-finite_sum(scores.log_probs))
            targets.append(len(scores.log_probs))
        raw += sum(map(len, rows))
        units += int(merged_model.pack(rows).unit_counts.sum())
    reduction = (raw - units) / raw if raw else 0.0
    return PerplexityResult(tuple(sums), tuple(targets), reduction)


def perplexity_figures(
    segments: Sequence[AnyInts], merged_model: MergedModel, batch_size: int = 8
) -> dict[str, float]:
    """Return perplexities of base model and compressed model on the same windows, by name.

    ``nats_increase`` is ln(PPL of UMIM / PPL of base). Standard errors (``_se``) are over windows,
    of the increase over the differences window by window; none of a single one.
    """
    base = perplexity(segments, merged_model.base(), batch_size)
    ours = perplexity(segments, merged_model, batch_size)
    increase, increase_error = ours.increase_over(base)
    errors = {
        "nats_base_se": base.nats_error,
        "nats_umim_se": ours.nats_error,
        "nats_increase_se": increase_error,
    }
    return {
        "ppl_base": base.ppl,
        "ppl_umim": ours.ppl,
        "ppl_token_reduction": ours.token_reduction,
        "nats_increase": increase,
        **{name: error for name, error in errors.items() if error is not None},
    }


def second_half_perplexity(
    segments: Sequence[AnyInts], scorer: RequestScorer, batch_size: int = 8
) -> PerplexityResult:
    """Compute the perplexity of raw second halves after first halves that were shortened.

    The protocol for methods that delete tokens or columns of the cache: what is deleted cannot be a
    target. The first half of a window of raw ids [T_b], 2 at least, has T // 2 tokens; every token
    of the second is a target. The token reduction is that of the first halves.
    """
    halves = [np.split(np.asarray(ids, dtype=np.int64), [len(ids) // 2]) for ids in segments]
    scored = scorer.score([Request(first, second) for first, second in halves], batch_size)
    return PerplexityResult(
        tuple(-score.log_prob for score in scored),
        tuple(len(second) for _, second in halves),
        scorer.total.context_token_reduction or 0.0,
    )
