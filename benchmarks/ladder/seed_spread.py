"""Statistics of the ladder: spread over seeds, and differences of two rows paired by text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import Report
from benchmarks.ladder.ladder_cells import ALIGNED
from umim_core.errors import ArtifactError
from umim_core.evaluation.row_spread import ratio_error
from umim_core.store.artifacts import canonical_json

NATS: Final = "ln_ppl"


def spread(values: Sequence[float]) -> Report:
    """Return mean, sample standard deviation (None of one value), least and largest."""
    return {
        "mean": float(np.mean(values)),
        "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
        "min": min(values),
        "max": max(values),
    }


def quality(cells: Sequence[Report], base: Report) -> Report:
    """Return the quality of one row over its seeds."""
    ratios = [cell["ppl"] / base["ppl"] for cell in cells]
    return {name: spread([cell[name] for cell in cells]) for name in ALIGNED} | {
        "ppl_ratio": spread(ratios)
    }


def difference(cells: Sequence[Report], others: Sequence[Report]) -> Report:
    """Return how a row differs from another one, on the same text from the same seeds.

    The standard error is over rows of text, of the difference that is the mean over the seeds: it
    says nothing about further seeds, whose differences stand beside it.

    Returns:
        For KL, Top-1 and ln ppl the mean, its standard error (``std``) and one value per seed.
    """
    differences: Report = {}
    for name in (*ALIGNED, NATS):
        own, other = ([_mean(cell, name) for cell in side] for side in (cells, others))
        seeds = [float(a - b) for (a, _), (b, _) in zip(own, other, strict=True)]
        rests = np.mean([a - b for (_, a), (_, b) in zip(own, other, strict=True)], axis=0)
        differences[name] = {
            "mean": float(np.mean(seeds)),
            "std": ratio_error(rests * len(rests), np.ones(len(rests))),
            "seeds": seeds,
        }
    return differences


def _mean(cell: Report, name: str) -> tuple[float, NDArray[np.float64]]:
    """Return a mean over tokens, and by how much each row of text moves it [B]: sums to 0.

    Rows at other merge depths have other numbers of aligned tokens at equal saving.
    """
    sums, counts = np.asarray(_sums(cell, name)), np.asarray(_counts(cell, name))
    mean = sums.sum() / counts.sum()
    return float(mean), (sums - mean * counts) / counts.sum()


def _sums(cell: Report, name: str) -> Sequence[float]:
    sums: Sequence[float] = cell["row_nats"] if name == NATS else cell["row_sums"][name]
    return sums


def _counts(cell: Report, name: str) -> Sequence[int]:
    counts: Sequence[int] = cell["row_targets" if name == NATS else "row_counts"]
    return counts


def check_same_batches(cells: Mapping[int, Mapping[str, Report]]) -> None:
    """Refuse to compare rows that were trained on other batches, or measured on other rows.

    Raises:
        ArtifactError: If the digests of their batches differ, their steps or numbers of targets.
    """
    for seed, trained in cells.items():
        for field in ("batches", "row_targets", "steps"):
            values = {row: cell[field] for row, cell in trained.items()}
            if len({canonical_json(value) for value in values.values()}) > 1:
                raise ArtifactError(
                    f"all rows of the ladder must have the same {field} in seed {seed}",
                    values,
                    "Empty the folder --cells and measure again.",
                )
