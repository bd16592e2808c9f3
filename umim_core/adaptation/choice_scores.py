"""Scores of the answers of multiple-choice questions, and what they say about a model.

A question's score of an answer is its mean token log-probability behind the compressed context,
which is what the preference loss trains. ``acc_tok`` of lm-eval's model is the same accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from umim_core.adaptation.choices import EncodedQuestion
from umim_core.adaptation.preference import ending_scores
from umim_core.errors import EvaluationError, NumericalError
from umim_core.merging.compressed import Compressed


@dataclass(frozen=True)
class ChoiceScores:
    """Scores of a task's questions, in their order.

    Attributes:
        scores: Mean token log-probability of every answer, per question (nats).
        golds: Index of the right answer per question.
        contexts: Raw tokens of all contexts, and units that they became.
        answers: Raw tokens of all answers; they stay raw.
    """

    scores: list[list[float]]
    golds: list[int]
    contexts: tuple[int, int]
    answers: int

    def hits(self) -> list[float]:
        """Return 1 per question whose right answer scores highest (ties: the first), else 0."""
        pairs = zip(self.scores, self.golds, strict=True)
        return [float(row.index(max(row)) == gold) for row, gold in pairs]

    def margins(self) -> list[float]:
        """Return by how much the right answer leads the best wrong one, per question (nats)."""
        pairs = zip(self.scores, self.golds, strict=True)
        return [row[gold] - max(row[:gold] + row[gold + 1 :]) for row, gold in pairs]

    def token_reduction(self) -> float:
        """Return the share of the contexts' tokens that merging saves."""
        raw, units = self.contexts
        return (raw - units) / raw

    def input_reduction(self) -> float:
        """Return the share of the tokens of contexts and answers that merging saves."""
        raw, units = self.contexts
        return (raw - units) / (raw + self.answers)


@torch.no_grad()
def score_choices(
    questions: Sequence[EncodedQuestion], compressed: Compressed, batch_size: int
) -> ChoiceScores:
    """Score every answer of every question.

    Raises:
        EvaluationError: If there is no question.
        NumericalError: If an answer's score is not finite.
    """
    if not questions:
        raise EvaluationError("a task must have questions", "none", "Give some.")
    order = sorted(range(len(questions)), key=lambda place: len(questions[place].context))
    scores: list[list[float]] = [[] for _ in questions]
    for start in range(0, len(order), batch_size):
        places = order[start : start + batch_size]
        found = ending_scores([questions[place] for place in places], compressed)
        for place, row in zip(places, found, strict=True):
            if not bool(row.isfinite().all()):
                raise NumericalError(
                    "the score of every answer must be finite",
                    f"{row.tolist()} in question {place}, counted from 0",
                    "Score in float32, or train with a lower learning rate.",
                )
            scores[place] = row.tolist()
    raw = sum(len(question.context) for question in questions)
    units = sum(len(compressed.segment_prompt(question.context)[0]) for question in questions)
    answers = sum(len(ending) for question in questions for ending in question.endings)
    return ChoiceScores(scores, [question.gold for question in questions], (raw, units), answers)
