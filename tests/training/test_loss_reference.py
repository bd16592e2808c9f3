"""The fused loss against log-softmax and autograd in float64: chunks, head bias, huge logits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.training.loss import distill_loss, summed_parts

ROWS, HIDDEN, VOCAB = 9, 8, 41
VALUE, GRADIENT = 1e-6, 1e-5
HUGE = 1e4


@dataclass(frozen=True)
class Case:
    """A head and the states of student and teacher in front of it.

    Attributes:
        backbone: Supplies the head [V, d] and its bias [V], if any.
        student: Hidden states [R, d].
        teacher: Hidden states [R, d].
    """

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
        assert leaf.grad is not None
        kl = (log_t.exp() * (log_t - log_s)).sum()
        return float(cross.detach()), float(kl.detach()), leaf.grad

    def check(self, chunk: int) -> None:
        """Compare the fused loss with the reference."""
        leaf = self.student.clone().requires_grad_(True)
        loss = distill_loss(leaf, self.teacher, self.backbone, chunk=chunk)
        loss.total.backward()
        cross, kl, gradient = self.reference()
        assert loss.rows == len(self.student)
        assert float(loss.total.detach()) == pytest.approx(cross, rel=VALUE)
        assert float(loss.kl) == pytest.approx(kl, rel=VALUE, abs=VALUE)
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad.double(), gradient, atol=GRADIENT, rtol=GRADIENT)


def head_of(weight: Tensor, bias: Tensor | None) -> Backbone:
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=HIDDEN, n_layer=1, n_head=2, n_positions=8, bos_token_id=0,
        eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.set_output_embeddings(nn.Linear(HIDDEN, VOCAB, bias=bias is not None))
    with torch.no_grad():
        model.lm_head.weight.copy_(weight)
        if bias is not None:
            model.lm_head.bias.copy_(bias)
    return wrap_backbone(model, None)


def ordinary(generator: torch.Generator, *, bias: bool, rows: int = ROWS) -> Case:
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
def test_the_loss_equals_the_reference_whatever_the_chunk(
    torch_rng: torch.Generator, bias: bool, chunk: int
) -> None:
    ordinary(torch_rng, bias=bias).check(chunk)


@pytest.mark.parametrize("chunk", [1, ROWS - 1, ROWS, ROWS + 1])
@pytest.mark.parametrize("bias", [False, True], ids=["plain-head", "head-with-bias"])
def test_logits_of_ten_thousand_have_the_value_and_the_gradient_of_the_reference(
    torch_rng: torch.Generator, bias: bool, chunk: int
) -> None:
    case = huge(torch_rng, bias=bias)
    logits = case.backbone.head(torch.cat([case.student, case.teacher]))
    assert float(logits.max()) >= HUGE / 2 and float(logits.min()) <= -HUGE / 2
    case.check(chunk)


@pytest.mark.parametrize("chunk", [1, 1024])
@pytest.mark.parametrize("bias", [False, True], ids=["plain-head", "head-with-bias"])
def test_no_rows_have_no_loss_and_an_empty_gradient(
    torch_rng: torch.Generator, bias: bool, chunk: int
) -> None:
    ordinary(torch_rng, bias=bias, rows=0).check(chunk)


def test_the_gradient_carries_the_scale_of_the_loss(torch_rng: torch.Generator) -> None:
    case = ordinary(torch_rng, bias=False)
    leaf = case.student.clone().requires_grad_(True)
    (distill_loss(leaf, case.teacher, case.backbone).total * 0.25).backward()
    torch.testing.assert_close(leaf.grad.double(), 0.25 * case.reference()[2], atol=1e-5, rtol=1e-5)


def test_the_divergence_and_the_teacher_carry_no_gradient(torch_rng: torch.Generator) -> None:
    case = ordinary(torch_rng, bias=False)
    teacher = case.teacher.requires_grad_(True)
    loss = distill_loss(case.student.requires_grad_(True), teacher, case.backbone)
    loss.total.backward()
    assert not loss.kl.requires_grad
    assert teacher.grad is None


def test_a_frozen_source_of_a_sum_is_refused() -> None:
    weight = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        summed_parts([weight.sum()], [weight, torch.ones(2)])


def test_a_half_precision_backbone_is_scored_in_single_precision(
    torch_rng: torch.Generator,
) -> None:
    case = ordinary(torch_rng, bias=False)
    half = Case(wrap_backbone(case.backbone.model.bfloat16(), None), case.student, case.teacher)
    loss = distill_loss(half.student, half.teacher, half.backbone)
    assert loss.total.dtype is torch.float32
    assert float(loss.total) == pytest.approx(half.reference()[0], rel=VALUE)
