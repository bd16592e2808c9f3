"""Repetition, diversity, perplexity and cache figures of generated texts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from umim_core.backbone.backbone import Backbone
from umim_core.errors import EvaluationError
from umim_core.evaluation.generation_quality import (
    continuation_perplexity,
    distinct,
    generation_quality,
    repetition,
)
from umim_core.inference.outputs import RowOutput

PROMPTS = [(5, 6, 7), (3,), (1, 2, 3, 4, 5, 6)]
TEXTS = [(1, 2, 1, 2, 1), (9, 9), (4, 8, 15, 16, 23)]
texts_of_few_ids = st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=6)


@given(texts=texts_of_few_ids, n=st.integers(1, 4))
def test_both_agree_with_counting_substrings(texts: list[list[int]], n: int) -> None:
    words = ["".join(map(str, text)) for text in texts]  # one digit per token
    grams = [[word[i : i + n] for i in range(len(word)) if i + n <= len(word)] for word in words]
    shares = [1 - len(set(found)) / len(found) for found in grams if found]
    pooled = [gram for found in grams for gram in found]
    if not pooled:
        assert math.isnan(repetition(texts, n)) and math.isnan(distinct(texts, n))
        return
    assert repetition(texts, n) == pytest.approx(sum(shares) / len(shares))
    assert distinct(texts, n) == pytest.approx(len(set(pooled)) / len(pooled))


def reference_perplexity(backbone: Backbone) -> float:
    """One row at a time through transformers, its own shift of targets."""
    total, count = 0.0, 0
    for prompt, text in zip(PROMPTS, TEXTS, strict=True):
        ids = torch.tensor([[*prompt, *text]])
        labels = ids.clone()
        labels[0, : len(prompt)] = -100
        with torch.no_grad():
            loss = backbone.model(input_ids=ids, labels=labels).loss
        total, count = total + float(loss) * len(text), count + len(text)
    return math.exp(total / count)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_perplexity_is_transformers_loss_on_the_generated_tokens(
    tiny_backbone: Backbone, batch_size: int
) -> None:
    ours = continuation_perplexity(PROMPTS, TEXTS, tiny_backbone, batch_size)
    assert ours == pytest.approx(reference_perplexity(tiny_backbone), rel=1e-5)


@pytest.mark.parametrize(
    ("prompts", "texts"), [(PROMPTS, TEXTS[:2]), (PROMPTS, [(), (), ()]), ([], [])]
)
def test_perplexity_of_nothing_is_refused(
    tiny_llama: Backbone, prompts: list[tuple[int, ...]], texts: list[tuple[int, ...]]
) -> None:
    with pytest.raises(EvaluationError, match="every prompt needs its continuation"):
        continuation_perplexity(prompts, texts, tiny_llama)


def row(prompt: tuple[int, ...], ids: tuple[int, ...], lengths: tuple[int, ...]) -> RowOutput:
    return RowOutput(
        ids=ids,
        prompt_ids=prompt,
        prompt_units=lengths[0],
        prompt_spans=(),
        generated_spans=(),
        cache_lengths=lengths,
        stop_reason="length",
    )


def test_a_set_is_measured_from_its_rows(tiny_llama: Backbone) -> None:
    rows = [
        row(PROMPTS[0], TEXTS[0], (2, 3, 3, 3, 4)),  # 4 fed: U = 1 1 1 2 of t = 1 2 3 4
        row(PROMPTS[1], TEXTS[1], (1, 2)),
        row(PROMPTS[2], TEXTS[2], (3, 4, 5, 6, 7)),
    ]
    found = generation_quality(rows, tiny_llama).metrics()
    assert found["token_reduction"] == pytest.approx((1 / 3 + 0 + 1 / 2) / 3)
    assert found["gen_kv_reduction"] == pytest.approx((1 / 2 + 0 + 0) / 3)
    assert found["cumulative_kv_reduction"] == pytest.approx((1 - 5 / 10) / 3)
    assert found["tokens"] == pytest.approx((5 + 2 + 5) / 3)
    assert found["rep_2"] == pytest.approx(0.5 / 3)
    assert found["dist_1"] == pytest.approx(8 / 12)
    assert found["ppl"] == pytest.approx(reference_perplexity(tiny_llama), rel=1e-5)
