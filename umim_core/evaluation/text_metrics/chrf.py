"""chrF of answers: F2 of character n-grams, by sacrebleu with its defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from umim_core.errors import MissingExtraError
from umim_core.evaluation.text_metrics.text_metric import add_text_metric, mean_figures


@add_text_metric("chrf")
def chrf(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    """Return chrF, 0..1; of several references the best counts.

    Raises:
        MissingExtraError: If sacrebleu is not installed.

    Source: Popovic, 2015; paper, "Generation Quality".
    """
    try:
        from sacrebleu.metrics.chrf import CHRF
    except ImportError as error:
        raise MissingExtraError(
            "chrF needs sacrebleu", str(error), "pip install 'umim[eval]'"
        ) from error
    scorer, references = CHRF(), list(row["references"])
    scores = [scorer.sentence_score(text, references).score for text in texts]
    return mean_figures([{"chrf": float(score) / 100} for score in scores])
