"""All metrics of texts by the names that tasks use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from umim_core.errors import ConfigError, did_you_mean
from umim_core.evaluation.text_metrics.answers import (
    PASS_FIGURES,
    code_tests,
    contest_answer,
    exact_match,
    recall,
    substring_match,
)
from umim_core.evaluation.text_metrics.bertscore import BERTSCORE, bertscore
from umim_core.evaluation.text_metrics.reference_similarity import KINDS, chrf, rouge


@dataclass(frozen=True)
class TextMetric:
    """A metric with its figures.

    ``runs_code`` says whether answers are run, ``needs_features`` whether it reads ``features`` of
    the row.
    """

    figures: tuple[str, ...]
    score: Callable[[Sequence[str], Mapping[str, Any]], Mapping[str, float]]
    runs_code: bool = False
    needs_features: bool = False


TEXT_METRICS: Final = {
    "bertscore": TextMetric((BERTSCORE,), bertscore, needs_features=True),
    "chrf": TextMetric(("chrf",), chrf),
    "code_tests": TextMetric(PASS_FIGURES, code_tests, runs_code=True),
    "contest_answer": TextMetric(PASS_FIGURES, contest_answer),
    "exact_match": TextMetric(("exact_match",), exact_match),
    "recall": TextMetric(("recall",), recall),
    "rouge": TextMetric(KINDS, rouge),
    "substring_match": TextMetric(("substring_match",), substring_match),
}


def find_metrics(names: Sequence[str]) -> list[TextMetric]:
    """Return metrics by name; an unknown one lists all."""
    for name in names:
        if name not in TEXT_METRICS:
            known = ", ".join(TEXT_METRICS)
            raise ConfigError(
                f"a text metric must be one of {known}", name, did_you_mean(name, TEXT_METRICS)
            )
    return [TEXT_METRICS[name] for name in names]
