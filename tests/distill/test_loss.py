"""The fused loss against plain float64, in value and gradient, at every chunk size."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.distill.loss import DistillLoss, distill_loss

ROWS, HIDDEN, VOCAB = 7, 8, 29


def backbone(*, bias: bool, scale: float = 0.5) -> Backbone:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=HIDDEN, n_layer=1, n_head=2, n_positions=8, bos_token_id=0,
        eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.set_output_embeddings(nn.Linear(HIDDEN, VOCAB, bias=bias))
    nn.init.normal_(model.lm_head.weight, std=scale)
    return wrap_backbone(model, None)


def states(seed: int, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass(frozen=True)
class Plain:
    """Loss sums and the gradient of the student's states, all logits at once, in float64."""

    cross_entropy: float
    kl: float
    gradient: Tensor

    @classmethod
    def of(cls, student: Tensor, teacher: Tensor, model: Backbone) -> Plain:
        weight = model.head_weight.double()
        bias = 0.0 if model.head_bias is None else model.head_bias.double()
        leaf = student.detach().double().requires_grad_(True)
        p_t = (teacher.double() @ weight.T + bias).softmax(-1)
        p_s = (leaf @ weight.T + bias).softmax(-1)
        cross = -(p_t * p_s.log()).sum()
        cross.backward()
        assert leaf.grad is not None
        kl = (p_t * (p_t / p_s).log()).sum()
        return cls(float(cross.detach()), float(kl.detach()), leaf.grad)


def fused(
    student: Tensor, teacher: Tensor, model: Backbone, chunk: int
) -> tuple[DistillLoss, Tensor]:
    leaf = student.detach().clone().requires_grad_(True)
    loss = distill_loss(leaf, teacher, model, chunk)
    loss.cross_entropy.backward()
    assert leaf.grad is not None
    return loss, leaf.grad


@pytest.mark.parametrize("chunk", [1, 3, ROWS - 1, ROWS, 2 * ROWS])
@pytest.mark.parametrize("bias", [False, True], ids=["plain-head", "head-with-bias"])
@pytest.mark.parametrize(
    ("dtype", "value", "gradient"),
    [(torch.float32, 1e-6, 1e-5), (torch.float64, 1e-12, 1e-6)],
    ids=["float32", "float64"],
)
def test_fused_loss_equals_plain_float64(
    chunk: int, bias: bool, dtype: torch.dtype, value: float, gradient: float
) -> None:
    model = backbone(bias=bias)
    student, teacher = states(1, dtype=dtype), states(2, dtype=dtype)
    plain = Plain.of(student, teacher, model)
    loss, grad = fused(student, teacher, model, chunk)
    assert loss.rows == ROWS
    assert float(loss.cross_entropy.detach()) == pytest.approx(plain.cross_entropy, rel=value)
    assert float(loss.kl) == pytest.approx(plain.kl, rel=value)
    torch.testing.assert_close(grad.double(), plain.gradient, atol=gradient, rtol=gradient)


def test_the_head_bias_counts() -> None:
    model = backbone(bias=True)
    assert model.head_bias is not None
    with torch.no_grad():
        model.head_bias[3] += 2.0
    student, teacher = states(1), states(2)
    loss, _ = fused(student, teacher, model, 4)
    without = Plain.of(student, teacher, backbone(bias=False)).cross_entropy
    assert float(loss.cross_entropy.detach()) != pytest.approx(without, rel=1e-3)


def test_logits_of_ten_thousand_stay_finite() -> None:
    model = backbone(bias=False)
    direction = model.head_weight[0] / model.head_weight[0].norm()
    student, teacher = (sign * 4e4 * direction.repeat(ROWS, 1) for sign in (1.0, -1.0))
    logits = model.head(student)
    assert float(logits.abs().max()) > 1e4
    loss, grad = fused(student, teacher, model, 2)
    assert all(bool(torch.isfinite(found).all()) for found in (loss.cross_entropy, loss.kl, grad))
    naive = Plain.of(student, teacher, model)  # log of an underflown softmax
    assert not torch.isfinite(torch.tensor(naive.cross_entropy))
    wide = student.double() @ model.head_weight.double().T
    exact = -((-wide).softmax(-1) * wide.log_softmax(-1)).sum()  # the teacher is minus the student
    assert float(loss.cross_entropy.detach()) == pytest.approx(float(exact), rel=1e-5)


def test_the_gradient_carries_the_scale_of_the_loss() -> None:
    model = backbone(bias=False)
    _, once = fused(states(1), states(2), model, 4)
    leaf = states(1).requires_grad_(True)
    (distill_loss(leaf, states(2), model, 4).cross_entropy * 0.25).backward()
    torch.testing.assert_close(leaf.grad, 0.25 * once)


def test_the_divergence_and_the_teacher_carry_no_gradient() -> None:
    teacher = states(2).requires_grad_(True)
    loss = distill_loss(states(1).requires_grad_(True), teacher, backbone(bias=False))
    loss.cross_entropy.backward()
    assert not loss.kl.requires_grad
    assert teacher.grad is None


def test_a_half_precision_backbone_is_scored_in_single_precision() -> None:
    torch.manual_seed(0)
    half = wrap_backbone(backbone(bias=False).model.to(torch.bfloat16), None)
    loss = distill_loss(states(1), states(2), half)
    assert loss.cross_entropy.dtype is torch.float32
    plain = Plain.of(states(1), states(2), half)
    assert float(loss.cross_entropy) == pytest.approx(plain.cross_entropy, rel=1e-6)
