"""The elementwise part of the loss: its precision, and the compiled kernel against the eager."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor

from support.engine_matrix import CONFIGS, tiny_backbone
from umim_core.config.recipe import DistillConfig
from umim_core.distill import loss as losses
from umim_core.distill.loss import blocked_terms, chunk_terms, distill_loss
from umim_core.errors import ConfigError


def logits(rows: int, vocab: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    teacher = 3.0 * torch.randn(rows, vocab, generator=generator)
    return teacher, teacher + 0.5 * torch.randn(rows, vocab, generator=generator)


def states(rows: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(rows, size, generator=generator)
    student = teacher + 0.3 * torch.randn(rows, size, generator=generator)
    return student.requires_grad_(), teacher


@pytest.fixture
def fresh_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """A compiler without its caches, in memory and on disk."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
    losses._terms.cache_clear()
    torch._dynamo.reset()
    yield
    losses._terms.cache_clear()
    torch._dynamo.reset()


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


def test_the_default_stays_out_of_dumps_and_so_of_stage_keys() -> None:
    assert "loss_kernel" not in DistillConfig(max_steps=1).model_dump()
    changed = DistillConfig(max_steps=1, loss_kernel="compiled")
    assert changed.model_dump()["loss_kernel"] == "compiled"


@pytest.mark.full
def test_compiled_and_eager_loss_agree(fresh_compiler: None) -> None:
    backbone = tiny_backbone(CONFIGS["llama"](), 1003, torch.float32, "sdpa")
    student, teacher = states(23, 32)
    found = []
    for kernel in ("eager", "compiled"):
        loss = distill_loss(student, teacher, backbone, chunk=10, kernel=kernel)  # 10 + 10 + 3
        (gradient,) = torch.autograd.grad(loss.cross_entropy, student)
        found.append((loss.cross_entropy, loss.kl, gradient))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_without_a_compiler_the_error_names_field_and_remedy(fresh_compiler: None) -> None:
    backbone = tiny_backbone(CONFIGS["llama"](), 11, torch.float32, "sdpa")
    student, teacher = states(5, 32)
    with (
        inductor.patch({"cpp.cxx": (None, "no-such-compiler")}),
        pytest.raises(ConfigError, match=r"loss_kernel compiled .*no-such-compiler.*eager"),
    ):
        distill_loss(student, teacher, backbone, kernel="compiled")
