"""Metrics of generated texts by name: matches, code tests, contests, ROUGE, BERTScore.

A metric takes the texts that answer one question and the question's row, and returns its figures,
the mean over the texts; lm-eval takes the mean over questions and its standard error.

BERTScore reads last hidden states of a causal model, not RoBERTa-large: it ranks texts among each
other and is called ``..._stand_in_features`` so that nobody compares it with published scores. The
formula is written out: bert-score takes every text of two tokens for an empty one, because the two
would be [CLS] and [SEP]. No weights by rarity, no rescaling by a baseline.

Shapes: T tokens of a text, R of a reference, d hidden size.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import comb
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn.functional import normalize

from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.errors import look_up
from umim_core.evaluation.code_sandbox import run_confined

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer


_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)


def recall(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    """Return the share of the references that occur in a text, in any case of letters.

    Source: RULER (Hsieh et al., 2024), ``string_match_all``.
    """
    references = [reference.lower() for reference in row["references"]]
    shares = [sum(w in text.lower() for w in references) / len(references) for text in texts]
    return {"recall": sum(shares) / len(shares)}


def substring_match(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    """Return 1 if a reference occurs in a text, both normalised, else 0.

    Source: Lost in the Middle (Liu et al., 2024), ``best_subspan_em``.
    """
    references = [normalised(reference) for reference in row["references"]]
    found = [any(w in text for w in references) for text in map(normalised, texts)]
    return {"substring_match": sum(found) / len(found)}


def exact_match(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    references = [normalised(reference) for reference in row["references"]]
    return {"exact_match": sum(normalised(text) in references for text in texts) / len(texts)}


def normalised(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and surplus spaces.

    A text of nothing else keeps its articles, or its punctuation: as an empty string it would occur
    in every answer.

    Source: SQuAD (Rajpurkar et al., 2016), the evaluation script.
    """
    plain = text.lower().translate(_NO_PUNCTUATION)
    words = _ARTICLES.sub(" ", plain).split() or plain.split() or text.lower().split()
    return " ".join(words)


PASS_ORDERS: Final = (1, 4, 8, 16)
PASS_FIGURES: Final = tuple(f"pass@{k}" for k in PASS_ORDERS)


def pass_at_k(answers: int, right: int, k: int) -> float:
    """Estimate pass@k of a question without bias: 1 - C(n - c, k) / C(n, k).

    ::

        n = 4 answers, c = 1 right, k = 2:  3 of 6 pairs hold the right one, 1 - 3/6 = 0.5

    Source: Chen et al., 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    return 1.0 - comb(answers - right, k) / comb(answers, k)


def pass_figures(right: Sequence[bool]) -> dict[str, float]:
    orders = [k for k in PASS_ORDERS if k <= len(right)]
    return {f"pass@{k}": pass_at_k(len(right), sum(right), k) for k in orders}


def code_tests(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    """Return pass@k: every answer runs behind its prompt, in the sandbox.

    The row's ``test`` defines ``check``, which gets the function that ``entry_point`` names.

    Source: HumanEval (Chen et al., 2021).
    """
    check = f"\n{row['test']}\ncheck({row['entry_point']})\n"
    return pass_figures([run_confined(row["prompt"] + text + check).passed for text in texts])


def contest_answer(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    r"""Return pass@k of all answers to a problem, as lm-eval's AIME tasks judge each.

    The answer is the last ``\boxed{...}``; it is a whole number, of which ``27.0`` is a spelling.
    """
    from lm_eval.tasks.aime.utils import process_results

    (reference,) = row["references"]
    problem = {"answer": reference.removesuffix(".0")}
    return pass_figures([process_results(problem, [text])["exact_match"] == 1 for text in texts])


def mean_figures(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


BERTSCORE: Final = "bertscore_stand_in_features"
KINDS: Final = ("rouge1", "rouge2", "rougeL", "rougeLsum")
# rouge-score's own sentence splitter needs data that nltk downloads.
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+")


def rouge(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    """Return the four F1 scores, 0..1; of several references the best counts, kind by kind.

    For ROUGE-Lsum every sentence is a line.

    Source: Lin, 2004; the paper's summarisation tables.
    """
    references = [_lines(reference) for reference in row["references"]]
    scored = [_rouge_scorer().score_multi(references, _lines(text)) for text in texts]
    return mean_figures(
        [{kind: float(scores[kind].fmeasure) for kind in KINDS} for scores in scored]
    )


def _lines(text: str) -> str:
    return "\n".join(_SENTENCE_END.split(text.strip()))


@cache
def _rouge_scorer() -> RougeScorer:
    from rouge_score.rouge_scorer import RougeScorer  # it comes with lm-eval

    return RougeScorer(list(KINDS), use_stemmer=True)


@torch.no_grad()
def token_features(texts: Sequence[str], backbone: Backbone, batch_size: int = 16) -> list[Tensor]:
    """Return the last hidden state of every token of every text [T, d], float32 on the CPU."""
    ids = [backbone.encode(text)[: backbone.max_positions] for text in texts]
    features: list[Tensor] = []
    for first in range(0, len(ids), batch_size):
        rows = ids[first : first + batch_size]
        longest = max(1, *map(len, rows))
        # Padding follows the texts, and no token of a causal model sees what follows it.
        padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
        states = backbone.hidden(backbone.embed(padded.to(backbone.device))).float().cpu()
        features += [state[: len(row)] for state, row in zip(states, rows, strict=True)]
    return features


_backbone = cache(load_backbone)


def greedy_bertscore(text: Tensor, reference: Tensor) -> float:
    """Match every token [T, d] with the nearest of the reference [R, d]; 0 where one is empty.

    ::

        text       (1, 0)  (0, 1)     cosines with the reference  1    0.6
        reference  (1, 0)  (3, 4)                                 0    0.8
        precision (1 + 0.8) / 2, recall (1 + 0.8) / 2, F1 0.9

    Source: Zhang et al., 2020, "BERTScore: Evaluating Text Generation with BERT", section 3.
    """
    if not (len(text) and len(reference)):
        return 0.0
    cosines = normalize(text.double(), dim=1) @ normalize(reference.double(), dim=1).T  # [T, R]
    precision, recall = float(cosines.amax(1).mean()), float(cosines.amax(0).mean())
    total = precision + recall
    return 2 * precision * recall / total if total > 0 else 0.0


def bertscore(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    """Return the F1 by the features that the row names; of several references the best counts."""
    backbone = _backbone(row["features"])
    answers, references = (token_features(each, backbone) for each in (texts, row["references"]))
    scores = [max(greedy_bertscore(text, each) for each in references) for text in answers]
    return {BERTSCORE: sum(scores) / len(scores)}


@dataclass(frozen=True)
class TextMetric:
    """A metric with its figures; one that ``needs_features`` reads ``features`` of the row."""

    figures: tuple[str, ...]
    score: Callable[[Sequence[str], Mapping[str, Any]], Mapping[str, float]]
    runs_code: bool = False
    needs_features: bool = False


TEXT_METRICS: Final = {
    "bertscore": TextMetric((BERTSCORE,), bertscore, needs_features=True),
    "code_tests": TextMetric(PASS_FIGURES, code_tests, runs_code=True),
    "contest_answer": TextMetric(PASS_FIGURES, contest_answer),
    "exact_match": TextMetric(("exact_match",), exact_match),
    "recall": TextMetric(("recall",), recall),
    "rouge": TextMetric(KINDS, rouge),
    "substring_match": TextMetric(("substring_match",), substring_match),
}


def find_metrics(names: Sequence[str]) -> list[TextMetric]:
    return [look_up(TEXT_METRICS, name, "a text metric") for name in names]
