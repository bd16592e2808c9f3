"""ROUGE-1, ROUGE-2, ROUGE-L and ROUGE-Lsum of answers, as F1 by rouge-score with its stemmer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from umim_core.errors import MissingExtraError
from umim_core.evaluation.text_metrics.text_metric import add_text_metric, mean_figures

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

KINDS: Final = ("rouge1", "rouge2", "rougeL", "rougeLsum")
# rouge-score's own sentence splitter needs data that nltk downloads.
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+")


@add_text_metric("rouge", *KINDS)
def rouge(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    """Return the four F1 scores, 0..1; of several references the best counts, kind by kind.

    For ROUGE-Lsum every sentence is a line.

    Raises:
        MissingExtraError: If rouge-score is not installed.

    Source: Lin, 2004; the paper's summarisation tables.
    """
    references = [_lines(reference) for reference in row["references"]]
    figures = []
    for text in texts:
        scores = _scorer().score_multi(references, _lines(text))
        figures.append({kind: float(scores[kind].fmeasure) for kind in KINDS})
    return mean_figures(figures)


def _lines(text: str) -> str:
    """Put every sentence of a text on a line of its own."""
    return "\n".join(_SENTENCE_END.split(text.strip()))


@cache
def _scorer() -> RougeScorer:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise MissingExtraError(
            "ROUGE needs rouge-score", str(error), "pip install 'umim[eval]'"
        ) from error
    return RougeScorer(list(KINDS), use_stemmer=True)
