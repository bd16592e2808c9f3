"""Alignment metrics against naive loops over Python lists, ties included."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from umim_core.evaluation import alignment
from umim_core.evaluation.alignment import (
    METRICS,
    AlignmentSums,
    row_divergence,
    row_metrics,
)

P = 0.9


def ranking(logits: list[float]) -> list[int]:
    return sorted(range(len(logits)), key=lambda token: (-logits[token], token))


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(value - top) for value in logits]
    mass = math.fsum(weights)
    return [weight / mass for weight in weights]


def nucleus(logits: list[float]) -> set[int]:
    probs, chosen, mass = softmax(logits), set[int](), 0.0
    for token in ranking(logits):
        if mass >= P:
            break
        chosen.add(token)
        mass += probs[token]
    return chosen


def naive(teacher: list[list[float]], student: list[list[float]]) -> dict[str, float]:
    sums = dict.fromkeys(METRICS, 0.0)
    for t, s in zip(teacher, student, strict=True):
        order_t, order_s = ranking(t), ranking(s)
        p_t, p_s = softmax(t), softmax(s)
        sums["top1"] += order_t[0] == order_s[0]
        for k in (3, 10):
            size = min(k, len(t))
            sums[f"top{k}"] += len(set(order_t[:size]) & set(order_s[:size])) / size
        ours, theirs = nucleus(t), nucleus(s)
        sums["topp"] += len(ours & theirs) / min(len(ours), len(theirs))
        sums["mrr"] += 1 / (1 + order_s.index(order_t[0]))
        cross = -math.fsum(a * math.log(b) for a, b in zip(p_t, p_s, strict=True))
        sums["cross_entropy"] += cross
        sums["kl"] += cross + math.fsum(a * math.log(a) for a in p_t)
    return {name: total / len(teacher) for name, total in sums.items()}


def measure(*batches: tuple[Tensor, Tensor]) -> dict[str, float]:
    sums = AlignmentSums()
    for teacher, student in batches:
        sums.add(row_metrics(teacher, student))
    return sums.means()


def logits(seed: int, rows: int = 12, vocab: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("noise", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("vocab", [2, 7, 40])
def test_every_metric_equals_a_naive_loop(noise: float, vocab: int) -> None:
    teacher = logits(1, vocab=vocab)
    student = teacher + noise * logits(2, vocab=vocab)
    expected = naive(teacher.tolist(), student.tolist())
    assert measure((teacher, student)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_vocabulary_beyond_what_is_sorted_equals_a_naive_loop(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steep rows end their nucleus among the sorted logits, flat ones do not; many logits tie."""
    vocab = 3000
    monkeypatch.setattr(alignment, "_BLOCK_BYTES", 3 * 8 * vocab)  # blocks of 3 and 2 rows
    slope = torch.tensor([0.05, 3.0, 0.3, 1.0, 0.1], dtype=torch.float64)[:, None]
    teacher, noise = (slope * logits(seed, rows=5, vocab=vocab) for seed in (6, 7))
    steps = [(part * 32).round().div(32).to(dtype) for part in (teacher, teacher + 0.5 * noise)]
    sizes = [len(nucleus(row)) for row in steps[0].tolist()]
    assert min(sizes) < 200 < alignment._LARGEST < max(sizes)
    found = row_metrics(*steps)
    expected = [naive([t], [s]) for t, s in zip(*(part.tolist() for part in steps), strict=True)]
    for name in ("top1", "top3", "top10", "topp", "mrr"):
        assert found[name].tolist() == [row[name] for row in expected], name
    for name in ("kl", "cross_entropy"):
        assert found[name].tolist() == pytest.approx([row[name] for row in expected], rel=1e-12)
    assert torch.equal(row_divergence(*steps), found["kl"])


def test_a_divergence_far_below_the_entropy_keeps_its_digits() -> None:
    """A constant step d of half the logits: KL = ln(1 + q (e^d - 1)) - q d, q the mass it is on."""
    teacher, step = logits(8, rows=3), 1e-4
    moved = torch.arange(40) < 20
    mass = teacher.softmax(-1)[:, moved].sum(-1).tolist()
    wanted = [math.log1p(q * math.expm1(step)) - q * step for q in mass]
    assert max(wanted) < 2e-9
    found = row_divergence(teacher, teacher + step * moved)
    assert found.tolist() == pytest.approx(wanted, rel=1e-5)


# Logits in steps of 0.75 tie often, and no partial sum of such a softmax lands on 0.9 exactly.
TIED = st.lists(
    st.lists(st.integers(-2, 2).map(lambda step: 0.75 * step), min_size=5, max_size=5),
    min_size=2,
    max_size=2,
)


@given(TIED)
def test_ties_are_broken_by_id_in_teacher_and_student(rows: list[list[float]]) -> None:
    teacher, student = [rows[0]], [rows[1]]
    found = measure((torch.tensor(teacher), torch.tensor(student)))
    assert found == pytest.approx(naive(teacher, student), abs=1e-6)


def test_means_are_over_rows_and_not_over_batches() -> None:
    teacher, student = logits(4), logits(5)
    whole = measure((teacher, student))
    parts = measure((teacher[:1], student[:1]), (teacher[1:], student[1:]))
    assert parts == pytest.approx(whole, abs=1e-12)
    assert measure((teacher, student), (teacher[:0], student[:0])) == pytest.approx(whole)


def test_without_rows_the_means_are_nan() -> None:
    assert all(math.isnan(value) for value in AlignmentSums().means().values())
