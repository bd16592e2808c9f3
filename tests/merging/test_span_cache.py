"""Surrogates that are kept for inference, against the module itself (reliability 8)."""

from __future__ import annotations

import pytest
import torch

from support.engine_matrix import build, module_for
from support.merge_modules import give_rows, module_of
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.span_cache import SpanCache

SPANS = [(1, 2), (3, 4, 5), (2, 1), (1, 2, 3, 4), (1, 2)]


@pytest.mark.parametrize("form", ["paper", "linear"])
def test_surrogates_are_the_modules_own_with_rows_and_without(form: str) -> None:
    module = give_rows(module_of(form, 32, 4, torch.float64), SPANS[:2])
    model = MergedModel(build("llama"), module, None)
    for span, found in zip(SPANS, SpanCache(model).find(SPANS), strict=True):
        direct = model.surrogates(torch.tensor([span]), torch.tensor([len(span)]))
        assert torch.allclose(found, direct[0], rtol=0, atol=1e-12)


def test_a_span_is_computed_once_and_gives_the_same_bits() -> None:
    backbone = build("llama", torch.float32)
    module = module_for(backbone)
    cache = SpanCache(MergedModel(backbone, module, None), kept_spans=3)
    computed: list[int] = []
    module.register_forward_pre_hook(lambda _, args: computed.append(len(args[0])))
    first = cache.find([(1, 2), (3, 4), (1, 2)])
    assert computed == [1, 1]  # each alone: its bits depend on no other span
    assert torch.equal(first[0], first[2])
    cache.find([(5, 6), (1, 2), (7, 8)])  # drops (3, 4), the span unused for longest
    assert len(computed) == 4
    cache.find([(1, 2)])
    assert len(computed) == 4
    assert torch.equal(cache.find([(3, 4)])[0], first[1])
    assert len(computed) == 5


def test_what_is_kept_has_the_precision_it_has_without_autocast() -> None:
    backbone = build("llama", torch.float32)
    model = MergedModel(backbone, module_for(backbone), None)
    cache, expected = SpanCache(model), SpanCache(model).find(SPANS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(cache.find(SPANS), expected)
    assert torch.equal(cache.find([(7, 8)]), SpanCache(model).find([(7, 8)]))
