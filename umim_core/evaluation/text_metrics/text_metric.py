"""Registry of metrics of generated texts: figures of one question's answers.

A file of this package adds a metric; tasks name it (``GenerationSet.metrics``). lm-eval takes the
mean over questions and its standard error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from umim_core.registry import Registry

Figures = Mapping[str, float]
Score = Callable[[Sequence[str], Mapping[str, Any]], Figures]


@dataclass(frozen=True)
class TextMetric:
    figures: tuple[str, ...]
    score: Score
    runs_code: bool = False
    needs_features: bool = False


TEXT_METRICS: Final = Registry[TextMetric]("umim_core.evaluation.text_metrics", "text metric")
"""All metrics by name; an unknown one lists them."""


def add_text_metric(
    name: str, *figures: str, runs_code: bool = False, needs_features: bool = False
) -> Callable[[Score], Score]:
    """Return a decorator that adds a function as a metric, by the name that tasks use.

    Its figures are by default one of the metric's own name. ``runs_code`` says whether answers are
    run, ``needs_features`` whether it reads ``features`` of the row.
    """

    def add(score: Score) -> Score:
        metric = TextMetric(figures or (name,), score, runs_code, needs_features)
        TEXT_METRICS.add(name)(metric)
        return score

    return add


def mean_figures(rows: Sequence[Figures]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
