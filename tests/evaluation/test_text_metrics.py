"""Metrics of texts against values counted by hand, and against the libraries' own."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.evaluation.text_metrics import (
    BERTSCORE,
    bertscore,
    exact_match,
    greedy_bertscore,
    pass_at_k,
    pass_figures,
    recall,
    rouge,
    substring_match,
    token_features,
)


def test_the_best_reference_counts_and_answers_are_averaged(backbone_path: Path) -> None:
    text, reference = torch.tensor([[1.0, 0], [0, 1]]), torch.tensor([[1.0, 0], [3, 4]])
    assert greedy_bertscore(text, reference) == pytest.approx(0.9)  # the docstring's example
    row = {"references": ["the cat sat", "near the sea"], "features": str(backbone_path)}
    assert bertscore(["near the sea"], row)[BERTSCORE] == pytest.approx(1.0)
    assert bertscore(["near the sea", ""], row)[BERTSCORE] == pytest.approx(0.5)
    assert 0 < bertscore(["the old dog"], row)[BERTSCORE] < 0.999


@pytest.mark.full  # bert-score imports matplotlib and pandas
@pytest.mark.parametrize("lengths", [(3, 5), (6, 4), (9, 9)])
def test_from_three_tokens_on_it_is_the_librarys_matching(lengths: tuple[int, int]) -> None:
    library = pytest.importorskip("bert_score.utils")
    generator = torch.Generator().manual_seed(1)
    text, reference = (torch.randn(length, 8, generator=generator) for length in lengths)
    rows = [
        value
        for states in (reference, text)
        for value in (states[None].clone(), torch.ones(1, len(states)), torch.ones(1, len(states)))
    ]
    _, _, f1_of_library = library.greedy_cos_idf(*rows)
    assert greedy_bertscore(text, reference) == pytest.approx(float(f1_of_library), abs=1e-6)


def f1(matches: int, answer: int, reference: int) -> float:
    precision, recall = matches / answer, matches / reference
    return 2 * precision * recall / (precision + recall) if matches else 0.0


def test_rouge_is_the_counted_overlaps() -> None:
    answer, reference = "the cat sat on the mat", "the cats lay on a mat"
    scores = rouge([answer], {"references": [reference]})
    assert scores["rouge1"] == pytest.approx(f1(4, 6, 6))  # the, cat(s), on, mat
    assert scores["rouge2"] == pytest.approx(f1(1, 5, 5))  # the cat(s)
    assert scores["rougeL"] == pytest.approx(f1(4, 6, 6))
    of_several = rouge(["one two", ""], {"references": ["three", "one two"]})
    assert of_several == dict.fromkeys(("rouge1", "rouge2", "rougeL", "rougeLsum"), 0.5)


@pytest.mark.parametrize("right", range(6))
@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_answer(right: int, k: int) -> None:
    draws = list(combinations([True] * right + [False] * (5 - right), k))
    assert pass_at_k(5, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert pass_figures([True]) == {"pass@1": 1.0}
    assert pass_figures([True, False, False, False]) == {"pass@1": 0.25, "pass@4": 1.0}


@pytest.mark.parametrize(
    ("metric", "references", "answer", "figure"),
    [
        (recall, ["123", "456", "789", "000"], " 123, 456, 789 and 000.", 1.0),
        (recall, ["123", "456", "789", "000"], "123 123 and 456", 0.5),
        (recall, ["123", "Abc"], "12 aBC", 0.5),
        (recall, ["123"], "", 0.0),
        (substring_match, ["other", "Harlow Mill"], "The Harlow Mill", 1.0),
        (substring_match, ["other", "Harlow Mill"], "It was  harlow\nmill, in 1911", 1.0),
        (substring_match, ["Harlow Mill"], "the Harlow-Mill.", 0.0),  # a hyphen joins, as in SQuAD
        (substring_match, ["other", "Harlow Mill"], "Harlow", 0.0),
        (exact_match, ["other", "Harlow Mill"], "The Harlow Mill", 1.0),
        (exact_match, ["other", "Harlow Mill"], "It was Harlow Mill, in 1911", 0.0),
        (exact_match, ["The", "!"], "the", 1.0),  # a text of articles alone keeps them
    ],
)
def test_matches_with_references(
    metric: Any, references: list[str], answer: str, figure: float
) -> None:
    row = {"references": references}
    assert metric([answer], row) == {metric.__name__: figure}
    assert metric([answer, ""], row) == {metric.__name__: figure / 2}  # the mean over texts


TEXTS = ("the cat sat on the mat", "near the old house", "a dog")


@pytest.fixture(scope="module")
def backbone(backbone_path: Path) -> Backbone:
    return load_backbone(str(backbone_path))


@torch.no_grad()
def own_states(text: str, backbone: Backbone) -> torch.Tensor:
    """The last states as transformers gives them, of one text without padding."""
    ids = torch.tensor([backbone.encode(text)])
    states: torch.Tensor = backbone.model(ids, output_hidden_states=True).hidden_states[-1][0]
    return states


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_features_are_the_last_states_of_each_text_alone(
    batch_size: int, backbone: Backbone
) -> None:
    found = token_features([*TEXTS, ""], backbone, batch_size)
    assert len(found) == 4 and found[3].shape == (0, backbone.hidden_size)
    for states, text in zip(found, TEXTS, strict=False):
        torch.testing.assert_close(states, own_states(text, backbone), rtol=1e-4, atol=1e-5)
