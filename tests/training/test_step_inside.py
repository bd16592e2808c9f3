"""The distillation step where spans merge inside the model, with adapters, and its loss blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from support.engine_matrix import build, random_prompts, random_rules
from support.merged_models import oracle_states, random_merged_model, units_of
from umim_core.training.loss import blocked_terms, chunk_terms
from umim_core.training.step import DistillModel

FORMS = [(1, 0), (1, 3), (0, 3)]


def rows_of() -> list[np.ndarray]:
    return [np.concatenate(random_prompts(seed, 2)) for seed in range(4)]


@pytest.mark.parametrize(("depth", "rank"), FORMS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_micro_batches_give_the_gradient_of_one_batch(family: str, depth: int, rank: int) -> None:
    model = random_merged_model(build(family), random_rules(3, False), depth, rank, rows=30)
    module = model.require_module().requires_grad_(True)
    rows = rows_of()
    cuts = [model.segment(ids) for ids in rows]
    found = []
    for micro in (1, 4):
        module.zero_grad(set_to_none=True)
        DistillModel(model, micro_batch=micro)(rows, cuts).total.backward()
        found.append({n: p.grad.to_dense().clone() for n, p in module.named_parameters()})
    assert all(torch.allclose(found[0][n], found[1][n], atol=1e-10) for n in found[0])
    moved = [n for n, gradient in found[0].items() if gradient.abs().sum() > 0]
    assert {"norm_o.weight", "linear_kv.weight", "rows.table"} <= set(moved)
    assert not rank or sum(n.startswith("adapters.") for n in moved) > 6


@pytest.mark.parametrize(("depth", "rank"), FORMS)
def test_a_frozen_parameter_gets_no_gradient_and_changes_no_other(depth: int, rank: int) -> None:
    model = random_merged_model(build("llama"), random_rules(3, False), depth, rank)
    module = model.require_module().requires_grad_(True)
    first = next((module if module.adapters is None else module.adapters).parameters())
    rows = rows_of()
    cuts = [model.segment(ids) for ids in rows]
    found = []
    for trained in (True, False):
        module.zero_grad(set_to_none=True)
        first.requires_grad_(trained)
        DistillModel(model)(rows, cuts).total.backward()
        found.append([None if p.grad is None else p.grad.clone() for p in module.parameters()])
    assert first.grad is None
    for whole, part in zip(*found, strict=True):
        assert part is None or torch.allclose(whole, part, atol=1e-12)
    assert sum(part is None for part in found[1]) == 1


def test_the_loss_is_the_divergence_of_the_oracle() -> None:
    backbone, matcher = build("llama"), random_rules(3, False)
    model = random_merged_model(backbone, matcher, 1, 3)
    rows = rows_of()
    total, count = 0.0, 0
    for ids in rows:
        units = units_of(matcher, ids.tolist(), len(ids))
        student = backbone.head(oracle_states(model, ids.tolist(), units)).log_softmax(-1)
        teacher = backbone.head(backbone.hidden(backbone.embed(torch.tensor([ids.tolist()])))[0])
        first = next(k for k, (_, n) in enumerate(units) if n > 1)
        for k, (start, n) in list(enumerate(units))[first:]:
            target = teacher[start + n - 1].log_softmax(-1)
            total += float((target.exp() * (target - student[k])).sum())
            count += 1
    loss = DistillModel(model)(rows, [model.segment(ids) for ids in rows])
    assert loss.rows == count
    assert float(loss.kl) == pytest.approx(total, abs=1e-9)


def test_the_loss_begins_where_it_is_asked_to() -> None:
    model = random_merged_model(build("llama"), random_rules(3, False), 1, 0)
    ids = rows_of()[0]
    cut = model.segment(ids)
    whole = DistillModel(model)([ids], [cut])
    late = DistillModel(model)([ids], [cut], [len(ids) - 3])
    ends = cut[0] + cut[1]
    assert late.rows == int((ends > len(ids) - 3).sum()) < whole.rows


def test_autocast_runs_the_parts_with_held_weights() -> None:
    model = random_merged_model(build("llama", torch.float32), random_rules(3, True), 1, 3)
    rows = rows_of()
    cuts = [model.segment(ids) for ids in rows]
    exact = DistillModel(model)(rows, cuts)
    rounded = DistillModel(model, autocast=True)(rows, cuts)
    assert float(rounded.kl) == pytest.approx(float(exact.kl), rel=0.1)


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
