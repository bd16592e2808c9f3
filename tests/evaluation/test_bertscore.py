"""BERTScore against values counted by hand, and against bert-score's own matching."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from umim_core.evaluation.text_metrics.bertscore import (
    BERTSCORE,
    bertscore,
    greedy_bertscore,
)


def drawn(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(length, 8, generator=generator) for length in lengths]


def test_two_tokens_are_matched_with_their_nearest() -> None:
    text, reference = torch.tensor([[1.0, 0], [0, 1]]), torch.tensor([[1.0, 0], [3, 4]])
    found = greedy_bertscore(text, reference)
    assert (found.precision, found.recall, found.f1) == pytest.approx((0.9, 0.9, 0.9))


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
    wanted = [float(value) for value in library.greedy_cos_idf(*rows)]
    found = greedy_bertscore(text, reference)
    assert [found.precision, found.recall, found.f1] == pytest.approx(wanted, abs=1e-6)
