"""Metrics of texts against values counted by hand, and against bert-score's own matching."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor

from umim_core.evaluation.text_metrics.bertscore import BERTSCORE, bertscore, greedy_bertscore
from umim_core.evaluation.text_metrics.code_tests import pass_at_k, pass_figures
from umim_core.evaluation.text_metrics.reference_similarity import chrf, rouge
from umim_core.evaluation.text_metrics.string_match import exact_match, recall, substring_match


def drawn(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(length, 8, generator=generator) for length in lengths]


def test_two_tokens_are_matched_with_their_nearest() -> None:
    text, reference = torch.tensor([[1.0, 0], [0, 1]]), torch.tensor([[1.0, 0], [3, 4]])
    assert greedy_bertscore(text, reference) == pytest.approx(0.9)


def test_the_best_reference_counts_and_answers_are_averaged(backbone_path: Path) -> None:
    row = {"references": ["the cat sat", "near the sea"], "features": str(backbone_path)}
    assert bertscore(["near the sea"], row)[BERTSCORE] == pytest.approx(1.0)
    assert bertscore(["near the sea", ""], row)[BERTSCORE] == pytest.approx(0.5)
    assert 0 < bertscore(["the old dog"], row)[BERTSCORE] < 0.999


@pytest.mark.full  # bert-score imports matplotlib and pandas
@pytest.mark.parametrize("lengths", [(3, 5), (6, 4), (9, 9)])
def test_from_three_tokens_on_it_is_the_librarys_matching(lengths: tuple[int, int]) -> None:
    library = pytest.importorskip("bert_score.utils")
    text, reference = drawn(*lengths)
    rows = [
        value
        for states in (reference, text)
        for value in (states[None].clone(), torch.ones(1, len(states)), torch.ones(1, len(states)))
    ]
    _, _, f1_of_library = library.greedy_cos_idf(*rows)
    assert greedy_bertscore(text, reference) == pytest.approx(float(f1_of_library), abs=1e-6)


def test_chrf_is_one_for_the_reference_and_the_best_of_several_counts() -> None:
    pytest.importorskip("sacrebleu", reason="sacrebleu is part of the `eval` extra")
    row = {"references": ["the cat sat", "a dog ran"]}
    assert chrf(["a dog ran"], row) == {"chrf": pytest.approx(1.0)}
    assert 0 < chrf(["the cats sit"], row)["chrf"] < 1
    assert chrf(["zzzz"], row) == {"chrf": 0.0}
    assert chrf(["the cat sat", "zzzz"], row) == {"chrf": pytest.approx(0.5)}


def f1(matches: int, answer: int, reference: int) -> float:
    precision, recall = matches / answer, matches / reference
    return 2 * precision * recall / (precision + recall) if matches else 0.0


def test_rouge_is_the_counted_overlaps() -> None:
    answer, reference = "the cat sat on the mat", "the cats lay on a mat"
    scores = rouge([answer], {"references": [reference]})
    assert scores["rouge1"] == pytest.approx(f1(4, 6, 6))  # the, cat(s), on, mat
    assert scores["rouge2"] == pytest.approx(f1(1, 5, 5))  # the cat(s)
    assert scores["rougeL"] == pytest.approx(f1(4, 6, 6))


def test_the_best_reference_counts_for_rouge_too() -> None:
    scores = rouge(["one two", ""], {"references": ["three", "one two"]})
    assert scores == dict.fromkeys(("rouge1", "rouge2", "rougeL", "rougeLsum"), 0.5)


@pytest.mark.parametrize("right", range(6))
@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_answer(right: int, k: int) -> None:
    draws = list(combinations([True] * right + [False] * (5 - right), k))
    assert pass_at_k(5, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_orders_of_pass_at_k_beyond_the_number_of_answers_are_left_out() -> None:
    assert pass_figures([True]) == {"pass@1": 1.0}
    assert pass_figures([True, False, False, False]) == {"pass@1": 0.25, "pass@4": 1.0}


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        (" 1234567, 7654321, 1111111 and 2222222.", 1.0),
        ("1234567 1234567 and 7654321", 0.5),
        ("123456", 0.0),
        ("", 0.0),
    ],
)
def test_recall_is_the_share_of_references_within(answer: str, share: float) -> None:
    row = {"references": ["1234567", "7654321", "1111111", "2222222"]}
    assert recall([answer], row) == {"recall": share}


@pytest.mark.parametrize(
    ("answer", "within", "exact"),
    [
        ("The Harlow Mill", 1.0, 1.0),
        ("It is the Harlow-Mill.", 0.0, 0.0),  # a hyphen joins words, as in SQuAD's script
        ("It was  harlow\nmill, in 1911", 1.0, 0.0),
        ("Harlow", 0.0, 0.0),
    ],
)
def test_matches_are_of_normalised_texts(answer: str, within: float, exact: float) -> None:
    row = {"references": ["other", "Harlow Mill"]}
    assert substring_match([answer], row) == {"substring_match": within}
    assert exact_match([answer], row) == {"exact_match": exact}
