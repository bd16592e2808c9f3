"""String matching of answers: recall of all references, a reference within, and exact match."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, Final

from umim_core.evaluation.text_metrics.text_metric import add_text_metric, mean_figures

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)


@add_text_metric("recall")
def recall(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    """Return the share of the references that occur in a text, in any case of letters.

    Source: RULER (Hsieh et al., 2024), ``string_match_all``.
    """
    wanted = [reference.lower() for reference in row["references"]]
    return mean_figures(
        [{"recall": sum(w in text.lower() for w in wanted) / len(wanted)} for text in texts]
    )


@add_text_metric("substring_match")
def substring_match(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    """Return 1 if a reference occurs in a text, both normalised, else 0.

    Source: Lost in the Middle (Liu et al., 2024), ``best_subspan_em``.
    """
    wanted = [normalised(reference) for reference in row["references"]]
    return mean_figures(
        [{"substring_match": float(any(w in normalised(text) for w in wanted))} for text in texts]
    )


@add_text_metric("exact_match")
def exact_match(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    """Return 1 if a text is a reference, both normalised, else 0."""
    wanted = [normalised(reference) for reference in row["references"]]
    return mean_figures([{"exact_match": float(normalised(text) in wanted)} for text in texts])


def normalised(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and surplus spaces.

    A text of nothing else keeps its articles, or its punctuation: as an empty string it would occur
    in every answer.

    Source: SQuAD (Rajpurkar et al., 2016), the evaluation script.
    """
    plain = text.lower().translate(_NO_PUNCTUATION)
    words = _ARTICLES.sub(" ", plain).split() or plain.split() or text.lower().split()
    return " ".join(words)
