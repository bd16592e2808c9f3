"""Cells of ``second_half``: one method at one token reduction, on the windows of the test text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common import Report
from benchmarks.engine_sides import Ids
from benchmarks.reducers.reducer_costs import merge_flops, merged, prefill
from benchmarks.timing import finished, timed
from umim_core import UMIM
from umim_core.backbone.shape import BackboneShape
from umim_core.baselines.forward_cost import causal_pairs, forward_flops
from umim_core.baselines.methods import BASELINES, EvictedColumns, MergedSpans, Method
from umim_core.baselines.reduction import TargetReduction
from umim_core.errors import BackboneError, RuleSetError
from umim_core.evaluation.method_scoring import (
    AnyScorer,
    EvictedScorer,
    ReducedScorer,
    method_scorer,
)
from umim_core.evaluation.perplexity import PerplexityResult, second_half_perplexity
from umim_core.evaluation.row_spread import increase_with_error
from umim_core.evaluation.scoring import Scorer
from umim_core.merging.compressed import Compressed
from umim_core.merging.span_eviction import EvictedStates
from umim_core.rules.matcher import Matcher
from umim_core.rules.pruning import Cut

UMIM_ITSELF: Final = "umim"
Rows = Sequence[NDArray[np.int32]]
ChooseRules = Callable[[float], Cut]


def wanted_cells(
    checkpoints: Sequence[str],
    methods: Sequence[str],
    targets: Sequence[float],
    raw_tails: Sequence[int],
) -> Iterator[Report]:
    """Yield the keys of all cells: target by target, UMIM first, which others are compared with.

    Args:
        checkpoints: Names; the first one lends its rules to baselines that follow rules.
        methods: Names of baselines.
        targets: Token reductions.
        raw_tails: Last tokens of first halves that stay raw, of UMIM alone.
    """
    for target in targets:
        for name in checkpoints:
            for tail in raw_tails:
                yield {"method": UMIM_ITSELF, "checkpoint": name, "target": target, "tail": tail}
        for method in methods:
            yield {"method": method, "checkpoint": checkpoints[0], "target": target, "tail": 0}


@dataclass(frozen=True)
class Subject:
    """A checkpoint whose backbone is measured, and the windows.

    Attributes:
        umim: Backbone, module and rules.
        rows: Windows of raw ids, all of one length.
        batch_size: Windows per forward.
    """

    umim: UMIM
    rows: Rows
    batch_size: int

    @property
    def _halves(self) -> list[Ids]:
        return [row[: len(row) // 2].astype(np.int64) for row in self.rows]

    @cached_property
    def _column_bytes(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        backbone = self.umim.backbone
        shape = BackboneShape.of_config(backbone.model.config)
        return 2 * shape.layers * shape.kv_width * backbone.dtype.itemsize

    def base(self) -> Report:
        """Measure the backbone alone: perplexity by window, cost and time of its prefill."""
        compressed = self.umim.compressed.base()
        read = second_half_perplexity(self.rows, self._scorer(compressed), self.batch_size)
        backbone, tokens = self.umim.backbone, len(self._halves[0])

        def read_half(half: Ids) -> None:
            prefill(backbone, backbone.embed(torch.from_numpy(half).to(backbone.device)[None]))

        seconds = self._median_seconds(read_half)
        found = self._costs(tokens, tokens)
        return found | {"ppl": read.ppl, "prefill_seconds": seconds} | _sums(read)

    def measure(self, cell: Report, rules: ChooseRules, base: Report) -> Report:
        """Return what a cell shows.

        Args:
            cell: Its key.
            rules: Chooses rules of this checkpoint that meet a token reduction.
            base: What the backbone alone shows.

        Returns:
            Its figures; ``unreached`` where the rules save less, ``not_run`` where the method needs
            a model that cannot be loaded.
        """
        try:
            scorer = self._scorer_of(cell, rules)
        except RuleSetError as error:
            return {"unreached": str(error.value)}
        except BackboneError as error:
            return {"not_run": str(error.value)}
        began = time.perf_counter()
        read = second_half_perplexity(self.rows, scorer, self.batch_size)
        seconds = time.perf_counter() - began
        contexts, windows = scorer.contexts, len(self.rows)
        held = scorer.held
        return {
            "side": "cache" if isinstance(scorer, EvictedScorer) else "prompt",
            "token_reduction": contexts.token_reduction,
            "cache_reduction": held.token_reduction,
            "shortfall": contexts.shortfall,
            "ppl": read.ppl,
            "ppl_ratio": ratio_to(base, _sums(read)),
            **_sums(read),
            **self._costs(round(contexts.units / windows), round(held.units / windows)),
            **self._compression(scorer),
            "seconds": seconds,
        }

    def _scorer(self, compressed: Compressed) -> Scorer:
        return Scorer(compressed, "prompt", max(map(len, self.rows)))

    def _scorer_of(self, cell: Report, rules: ChooseRules) -> AnyScorer:
        """Return what shortens and scores."""
        own, target = self.umim.compressed, cell["target"]
        if cell["method"] == UMIM_ITSELF:
            cut = own.merging_by(Matcher(rules(target).rules))
            return self._scorer(cut.reading("prompt", cell["tail"]))
        make, longest = BASELINES.find(cell["method"]), max(map(len, self.rows))
        try:
            own = own.merging_by(Matcher(rules(target).rules))
        except RuleSetError:
            method = make(own.backbone, own.require_matcher())
            if follows_rules(method):
                raise
            return method_scorer(method, own, longest, TargetReduction(target))
        return method_scorer(make(own.backbone, own.require_matcher()), own, longest)

    def _costs(self, read: int, held: int) -> Report:
        """Return the estimated cost of a first half: so many units read, so many columns held."""
        return {
            "prefill_flops": forward_flops(self.umim.backbone.model, read, causal_pairs(read), 1),
            "kv_bytes": held * self._column_bytes,
        }

    def _compression(self, scorer: AnyScorer) -> Report:
        """Return what shortening one first half takes; of the cache it is part of the prefill."""
        windows = len(self.rows)
        if isinstance(scorer, ReducedScorer):
            return {
                "compress_seconds": scorer.seconds / windows,
                "compress_flops": scorer.flops // windows,
            }
        if isinstance(scorer, EvictedScorer):
            return {"compress_seconds": None, "compress_flops": None}
        return self._merging(scorer.compressed)

    def _merging(self, compressed: Compressed) -> Report:
        """Measure matching and merging of one first half after the other, embeddings included."""
        flops = [merge_flops(compressed, half) for half in self._halves]
        return {
            "compress_seconds": self._median_seconds(partial(merged, compressed)),
            "compress_flops": sum(flops) // len(flops),
        }

    def _median_seconds(self, run: Callable[[Ids], object]) -> float:
        """Return the median time of a run over the first halves, one after the other."""
        device = self.umim.backbone.device
        return float(
            np.median([timed(finished(partial(run, half), device))[0] for half in self._halves])
        )


def follows_rules(method: Method) -> bool:
    """Return whether the rules decide what goes, not a budget."""
    evicted = isinstance(method, EvictedColumns) and isinstance(method.states, EvictedStates)
    return evicted or isinstance(method, MergedSpans)


def ratio_to(base: Report, own: Report) -> dict[str, float | None]:
    """Return a ratio of perplexities with its standard error, paired by window.

    Args:
        base: Sums and targets by window of what it is taken to.
        own: The same of the method.
    """
    nats, error = increase_with_error(own["row_sums"], base["row_sums"], own["row_targets"])
    ratio = math.exp(nats)
    return {"mean": ratio, "std": None if error is None else ratio * error}


def _sums(read: PerplexityResult) -> dict[str, Any]:
    return {"row_sums": list(read.row_sums), "row_targets": list(read.row_targets)}


def in_words(cell: Report) -> str:
    """Return a cell in words."""
    tail = f", raw tail {cell['tail']}" if cell["tail"] else ""
    name = f"{cell['checkpoint']}: {cell['method']}{tail} at {cell['target']:.0%}"
    for absent in ("unreached", "not_run"):
        if absent in cell:
            return f"{name}: {absent.replace('_', ' ')}, {cell[absent]}"
    return (
        f"{name}: TR {cell['token_reduction']:.2%}, of the cache {cell['cache_reduction']:.2%}, "
        f"perplexity x{cell['ppl_ratio']['mean']:.3f}, {cell['seconds']:.0f} s"
    )
