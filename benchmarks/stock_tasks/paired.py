"""Statistics of ``stock_tasks``: accuracies, and differences to the base model by question."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from benchmarks.common import Report
from benchmarks.stock_tasks.task_sides import BASE, HF, NO_RULES
from umim_core.errors import ArtifactError

METRICS: Final = ("acc", "acc_norm")


def mean_of(values: Sequence[float]) -> dict[str, float]:
    """Return the mean and its standard error (``std``), of at least two values."""
    return {
        "mean": float(np.mean(values)),
        "std": float(np.std(values, ddof=1)) / math.sqrt(len(values)),
    }


def mean_of_means(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of independent means, and its standard error."""
    errors = [value["std"] ** 2 for value in values]
    return {
        "mean": float(np.mean([value["mean"] for value in values])),
        "std": math.sqrt(sum(errors)) / len(errors),
    }


def reduction(tally: Mapping[str, int]) -> float | None:
    """Return the token reduction of a count of raw tokens and units; None where none were."""
    return 1 - tally["units"] / tally["raw"] if tally["raw"] else None


def check_same_questions(task: str, cells: Mapping[str, Report]) -> None:
    """Refuse to compare sides of a task that answered other questions.

    Raises:
        ArtifactError: If the digests of their questions differ.
    """
    digests = {side: cell["documents"][:12] for side, cell in cells.items()}
    if len(set(digests.values())) > 1:
        raise ArtifactError(
            f"the sides of {task} must have answered the same questions",
            digests,
            "Empty the folder --cells and measure again.",
        )


def summary(cell: Report, base: Report) -> Report:
    """Return accuracies, their paired differences to the base model, and token reductions.

    Args:
        cell: One task, one side.
        base: The same task on the base model.
    """
    found: Report = {
        name: cell[name] for name in ("questions", "of", "split", "seconds", "inputs", "contexts")
    }
    for metric in METRICS:
        if metric in cell:
            found[metric] = mean_of(cell[metric])
            found[f"{metric}_difference"] = mean_of(np.subtract(cell[metric], base[metric]))
    found["choices_changed"] = float(np.mean(choices(cell) != choices(base)))
    found["token_reduction"] = reduction(cell["inputs"]) or 0.0
    found["context_token_reduction"] = reduction(cell["contexts"])
    return found


def choices(cell: Report) -> np.ndarray:
    """Return the likeliest answer of every question [Q]."""
    return np.array([int(np.argmax(values)) for values in cell["log_likelihoods"]])


def largest_difference(cell: Report, other: Report) -> float:
    """Return the largest difference of a log-likelihood between two sides (nats)."""
    pairs = zip(cell["log_likelihoods"], other["log_likelihoods"], strict=True)
    return max(float(np.abs(np.subtract(one, two)).max()) for one, two in pairs)


def compare(cells: Mapping[str, Report]) -> Report:
    """Return how the sides without merging compare with lm-eval's own model on one task."""
    found: Report = {}
    for side in (BASE, NO_RULES):
        if side in cells and HF in cells:
            found[side] = {
                "difference": largest_difference(cells[side], cells[HF]),
                "other_choices": int((choices(cells[side]) != choices(cells[HF])).sum()),
                "seconds": cells[side]["seconds"],
                "hf_seconds": cells[HF]["seconds"],
                "same_call": not (cells[side]["kept"] or cells[HF]["kept"]),
            }
    return found


def averages(tasks: Mapping[str, Report], sides: Iterable[str]) -> Report:
    """Return the mean over tasks of some sides; a task without acc_norm counts its acc there."""
    found: Report = {}
    for side in sides:
        rows = [task["sides"][side] for task in tasks.values()]
        tallies = {
            of: {x: sum(row[of][x] for row in rows) for x in ("raw", "units")}
            for of in ("inputs", "contexts")
        }
        found[side] = {
            "token_reduction": reduction(tallies["inputs"]) or 0.0,
            "context_token_reduction": reduction(tallies["contexts"]),
            "seconds": sum(row["seconds"] for row in rows),
        }
        for name in ("", "_difference"):
            found[side] |= {
                f"acc{name}": mean_of_means([row[f"acc{name}"] for row in rows]),
                f"acc_norm{name}": mean_of_means(
                    [row.get(f"acc_norm{name}", row[f"acc{name}"]) for row in rows]
                ),
            }
    return found
