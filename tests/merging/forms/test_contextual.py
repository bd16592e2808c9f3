"""Depth 3 against its formula: two layers of self-attention, then attention pooling."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from support.merge_modules import (
    Row,
    attend,
    layer_norm,
    linear,
    module_of,
    placed,
    pooled,
    spans_of,
)
from support.merge_modules import uniform as draw
from umim_core.merging.module import ContextualPooling, MergeModule
from umim_core.rules.grams import LONGEST


def attended(layer: torch.nn.Module, heads: int, span: list[Row]) -> list[Row]:
    """One pre-norm layer of self-attention, token by token."""
    size = len(span[0])
    borders = list(pairwise(range(0, size + 1, size // heads)))
    wide = [linear(layer_norm(e, layer.norm), layer.linear_qkv) for e in span]
    queries, keys, values = ([row[i * size : (i + 1) * size] for row in wide] for i in range(3))
    out = []
    for token, query in zip(span, queries, strict=True):
        mixed: Row = []
        for a, b in borders:
            mixed += attend(query[a:b], [k[a:b] for k in keys], [v[a:b] for v in values])
        added = linear(mixed, layer.linear_o)
        out.append([x + y for x, y in zip(token, added, strict=True)])
    return out


@pytest.mark.parametrize("form", ["depth 3", "depth 3, learned"])
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_equals_the_formula_in_plain_arithmetic(
    form: str, length: int, torch_rng: torch.Generator
) -> None:
    module = module_of(form, 8, 2, torch.float64)
    spans = spans_of(1, length, 8, torch_rng).double()
    got = module(spans, torch.tensor([length]))[0]
    span = placed(module, spans[0].tolist())
    for layer in module.layers:
        span = attended(layer, 2, span)
    want = torch.tensor(pooled(module, span), dtype=torch.float64)
    assert torch.allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("size", "heads"), [(16, 4), (64, 1), (128, 8)])
def test_has_two_layers_more_than_the_paper(size: int, heads: int) -> None:
    for positions, more in (("none", 0), ("learned", LONGEST)):
        module = MergeModule(size, heads, positions, depth=3)
        assert isinstance(module, ContextualPooling)
        count = sum(parameter.numel() for parameter in module.parameters())
        assert count == 10 * size * size + (19 + more) * size


def test_the_pooling_is_drawn_as_at_depth_1_and_the_layers_after_it() -> None:
    paper, deep = MergeModule(16), MergeModule(16, depth=3)
    generator = torch.Generator().manual_seed(8)
    paper.initialise(0.5, generator)  # leaves the generator where the layers begin
    deep.initialise(0.5, torch.Generator().manual_seed(8))
    state = deep.state_dict()
    for name, value in paper.state_dict().items():
        assert torch.equal(state[name], value), name
    for layer in deep.layers:
        weight, bias = draw(layer.linear_qkv, 0.25, generator)
        assert torch.equal(layer.linear_qkv.weight, weight)
        assert torch.equal(layer.linear_qkv.bias, bias)
        weight, bias = draw(layer.linear_o, 0.25, generator)
        assert torch.equal(layer.linear_o.weight, 0.5 * weight)
        assert torch.equal(layer.linear_o.bias, 0.5 * bias)


@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_layers_begin_below_the_scale_of_the_embeddings(
    scale: float, torch_rng: torch.Generator
) -> None:
    module = MergeModule(64, depth=3)
    module.initialise(scale, torch_rng)
    spans = scale * spans_of(100, 3, 64, torch_rng)
    added = module.layers[0](spans, torch.ones(100, 3, dtype=torch.bool)) - spans
    assert 0.05 * scale < added.std().item() < scale
