"""The elementwise part of the loss: its precision, and blocks of rows against whole chunks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from umim_core.training.loss import blocked_terms, chunk_terms


def logits(rows: int, vocab: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    teacher = 3.0 * torch.randn(rows, vocab, generator=generator)
    return teacher, teacher + 0.5 * torch.randn(rows, vocab, generator=generator)


def test_sums_over_a_large_vocabulary_keep_single_precision() -> None:
    teacher, student = logits(8, 50_257)
    wide = chunk_terms(teacher.double(), student.double())
    for found, expected in zip(chunk_terms(teacher, student)[:2], wide[:2], strict=True):
        assert float(found) == pytest.approx(float(expected), rel=3e-6)


@pytest.mark.parametrize(("rows", "vocab"), [(11, 50_257), (70, 8192), (3, 300_000), (0, 64)])
def test_blocks_of_rows_give_the_terms_of_the_whole_chunk(rows: int, vocab: int) -> None:
    teacher, student = logits(rows, vocab)
    whole = chunk_terms(teacher, student)
    for found, expected in zip(blocked_terms(teacher, student.clone()), whole, strict=True):
        if vocab == 300_000:  # a row alone in its block
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
        else:
            assert torch.equal(found, expected)
