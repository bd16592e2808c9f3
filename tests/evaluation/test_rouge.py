"""ROUGE against values counted by hand."""

from __future__ import annotations

import pytest

from umim_core.evaluation.text_metrics.rouge import rouge


def f1(matches: int, answer: int, reference: int) -> float:
    precision, recall = matches / answer, matches / reference
    return 2 * precision * recall / (precision + recall) if matches else 0.0


def test_scores_are_the_counted_overlaps() -> None:
    answer, reference = "the cat sat on the mat", "the cats lay on a mat"
    scores = rouge([answer], {"references": [reference]})
    assert scores["rouge1"] == pytest.approx(f1(4, 6, 6))  # the, cat(s), on, mat
    assert scores["rouge2"] == pytest.approx(f1(1, 5, 5))  # the cat(s)
    assert scores["rougeL"] == pytest.approx(f1(4, 6, 6))


def test_the_best_reference_counts_and_answers_are_averaged() -> None:
    scores = rouge(["one two", ""], {"references": ["three", "one two"]})
    assert scores == dict.fromkeys(("rouge1", "rouge2", "rougeL", "rougeLsum"), 0.5)
