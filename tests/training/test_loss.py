"""Aligned rows against the paper's algorithm; the fused loss against autograd in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from support.merged_models import units_of_lengths
from support.tiny_models import random_backbone
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.merging.packing import PackedUnits, pack_rows
from umim_core.training.loss import aligned_rows, blocked_terms, distill_loss, row_terms

ROWS, HIDDEN, VOCAB = 9, 8, 41
VALUE, GRADIENT = 1e-6, 1e-5
HUGE = 1e4


class Case(NamedTuple):
    """A head and the states [R, d] of student and teacher in front of it."""

    backbone: Backbone
    student: Tensor
    teacher: Tensor

    def reference(self) -> tuple[float, float, Tensor]:
        """Cross-entropy sum, divergence sum and the gradient of the student's states."""
        head, bias = self.backbone.head_weight.double(), self.backbone.head_bias
        shift = torch.zeros(VOCAB, dtype=torch.float64) if bias is None else bias.double()
        leaf = self.student.double().requires_grad_(True)
        log_s = (leaf @ head.T + shift).log_softmax(-1)
        log_t = (self.teacher.double() @ head.T + shift).log_softmax(-1)
        cross = -(log_t.exp() * log_s).sum()
        cross.backward()
        kl = (log_t.exp() * (log_t - log_s)).sum()
        return float(cross.detach()), float(kl.detach()), leaf.grad


def head_of(weight: Tensor, bias: Tensor | None) -> Backbone:
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_attention_heads": 2}
    family = "gpt2" if bias is None else "phi"
    backbone = random_backbone(family, **sizes, tie_word_embeddings=False)
    with torch.no_grad():
        backbone.head_weight.copy_(weight)
        if bias is not None:
            backbone.head_bias.copy_(bias)
    return backbone


def ordinary(generator: torch.Generator, *, bias: bool = False, rows: int = ROWS) -> Case:
    """Logits of a few units; the bias is as large as they are."""
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    shift = 3.0 * torch.randn(VOCAB, generator=generator) if bias else None
    student, teacher = torch.randn(2, rows, HIDDEN, generator=generator)
    return Case(head_of(weight, shift), student, teacher)


def huge(generator: torch.Generator, *, bias: bool) -> Case:
    """Logits up to 1e4, whole numbers, so that single precision holds them exactly.

    Student and teacher differ by little in every second row and by all of it in the others.
    """
    weight = torch.randint(-2, 3, (VOCAB, HIDDEN), generator=generator).float()
    shift = torch.randint(-3, 4, (VOCAB,), generator=generator).float() if bias else None
    teacher = torch.randint(-1200, 1201, (ROWS, HIDDEN), generator=generator).float()
    student = -teacher
    student[::2] = teacher[::2] + torch.randint(-1, 2, teacher[::2].shape, generator=generator)
    peak = (teacher @ weight.T).abs().argmax(-1)
    teacher[0] = HUGE / weight[peak[0]].square().sum() * weight[peak[0]]
    return Case(head_of(weight, shift), student, teacher)


@pytest.mark.parametrize("chunk", [1, ROWS - 1, ROWS, ROWS + 1])
@pytest.mark.parametrize("bias", [False, True], ids=["plain-head", "head-with-bias"])
@pytest.mark.parametrize("kind", ["ordinary", "huge", "no rows"])
def test_the_loss_equals_the_reference_whatever_the_chunk(
    torch_rng: torch.Generator, kind: str, bias: bool, chunk: int
) -> None:
    if kind == "huge":
        case = huge(torch_rng, bias=bias)
        logits = case.backbone.head(torch.cat([case.student, case.teacher]))
        assert float(logits.max()) >= HUGE / 2 and float(logits.min()) <= -HUGE / 2
    else:
        case = ordinary(torch_rng, bias=bias, rows=0 if kind == "no rows" else ROWS)
    leaf, teacher = (x.clone().requires_grad_(True) for x in (case.student, case.teacher))
    loss = distill_loss(leaf, teacher, case.backbone, chunk=chunk)
    (loss.total * 0.25).backward()
    cross, kl, gradient = case.reference()
    assert loss.weight == len(case.student)
    assert float(loss.total.detach()) == pytest.approx(cross, rel=VALUE)
    assert float(loss.kl) == pytest.approx(kl, rel=VALUE, abs=VALUE)
    torch.testing.assert_close(4.0 * leaf.grad.double(), gradient, atol=GRADIENT, rtol=GRADIENT)
    assert not loss.kl.requires_grad and teacher.grad is None


def test_a_half_precision_backbone_is_scored_in_single_precision(
    torch_rng: torch.Generator,
) -> None:
    case = ordinary(torch_rng)
    half = case._replace(backbone=wrap_backbone(case.backbone.model.bfloat16(), None))
    loss = distill_loss(half.student, half.teacher, half.backbone)
    assert loss.total.dtype is torch.float32
    assert float(loss.total) == pytest.approx(half.reference()[0], rel=VALUE)


def some_logits(rows: int, vocab: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    teacher = 3.0 * torch.randn(rows, vocab, generator=generator)
    return teacher, teacher + 0.5 * torch.randn(rows, vocab, generator=generator)


def test_sums_over_a_large_vocabulary_keep_single_precision() -> None:
    teacher, student = some_logits(8, 50_257)
    wide = row_terms(teacher.double(), student.double())
    for found, expected in zip(row_terms(teacher, student)[:2], wide[:2], strict=True):
        assert float(found.sum()) == pytest.approx(float(expected.sum()), rel=3e-6)


@pytest.mark.parametrize(("rows", "vocab"), [(11, 50_257), (70, 8192), (3, 300_000), (0, 64)])
def test_blocks_of_rows_give_the_terms_of_the_whole_chunk(rows: int, vocab: int) -> None:
    teacher, student = some_logits(rows, vocab)
    whole = row_terms(teacher, student)
    for found, expected in zip(blocked_terms(teacher, student.clone()), whole, strict=True):
        if vocab == 300_000:  # a row alone in its block
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
        else:
            assert torch.equal(found, expected)


def pack(*rows: list[int]) -> PackedUnits:
    """Pack rows given by the lengths of their units; the ids count up."""
    ids = [np.arange(1, sum(lengths) + 1) for lengths in rows]
    return pack_rows(ids, list(map(units_of_lengths, rows)))


def pairs(
    packed: PackedUnits, states: list[NDArray[np.bool_]] | None = None
) -> list[tuple[int, int, int]]:
    return list(zip(*(index.tolist() for index in aligned_rows(packed, states)), strict=True))


def test_the_example_of_the_paper() -> None:
    # x1 | x2 x3 | x4 | x5 x6 has (x3, z23), (x4, x4), (x6, z56), counted from 0
    assert pairs(pack([1, 2, 1, 2])) == [(0, 2, 1), (0, 3, 2), (0, 5, 3)]


def test_units_that_end_at_other_states_have_no_loss() -> None:
    states = [np.arange(6) == 3, np.arange(4) < 2]
    assert pairs(pack([1, 2, 1, 2], [2, 1, 1]), states) == [(0, 3, 2), (1, 1, 0)]


def algorithm(rows: list[list[int]]) -> list[tuple[int, int, int]]:
    """Algorithm "Aligned Predictive Distillation" of the paper, line by line, with padding."""
    width = max(sum(lengths) for lengths in rows)
    packed_width = max(len(lengths) for lengths in rows)
    packs = []
    for b, lengths in enumerate(rows):
        keep: list[int] = []  # n - 1 inactive placeholders, then the surrogate
        first_merge = None
        for n in lengths:
            if n > 1 and first_merge is None:
                first_merge = len(keep)
            keep += [0] * (n - 1) + [1]
        keep += [0] * (width - len(keep))
        attention = [1] * len(lengths) + [0] * (packed_width - len(lengths))
        start = width if first_merge is None else first_merge
        mask_t = [m if j >= start else 0 for j, m in enumerate(keep)]
        drop = sum(attention) - sum(mask_t)
        mask_s = list(attention)
        for j in range(packed_width):
            if attention[j] and drop:
                mask_s[j] = 0
                drop -= 1
        rows_t = [j for j, m in enumerate(mask_t) if m]
        rows_s = [j for j, m in enumerate(mask_s) if m]
        packs += [(b, t, s) for t, s in zip(rows_t, rows_s, strict=True)]
    return packs


@given(st.lists(st.lists(st.sampled_from([1, 1, 1, 2, 3, 4]), min_size=1, max_size=12), min_size=1))
def test_random_spans_and_padding_give_the_rows_of_the_algorithm(rows: list[list[int]]) -> None:
    assert pairs(pack(*rows)) == algorithm(rows)
