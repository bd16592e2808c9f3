"""The linear and the paper's form against their formulas, and what they cannot see."""

from __future__ import annotations

import pytest
import torch

from support.merge_modules import layer_norm, linear, module_of, placed, pooled, spans_of, uniform
from umim_core.merging.module import LinearMerge, MergeModule
from umim_core.rules.grams import LONGEST


@pytest.mark.parametrize("form", ["paper", "learned"])
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_equals_the_formula_in_plain_arithmetic(
    form: str, length: int, torch_rng: torch.Generator
) -> None:
    module = module_of(form, 8, 2, torch.float64)
    span = spans_of(1, length, 8, torch_rng).double()
    got = module(span, torch.tensor([length]))[0]
    want = pooled(module, placed(module, span[0].tolist()))
    assert torch.allclose(got, torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("size", "heads"), [(4, 4), (16, 4), (64, 1), (128, 8), (256, 4)])
def test_has_exactly_the_parameters_of_the_paper(size: int, heads: int) -> None:
    def count(module: MergeModule) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    assert count(MergeModule(size, heads)) == 2 * size * size + 7 * size
    assert count(MergeModule(size, heads, "learned")) == 2 * size * size + (7 + LONGEST) * size


def test_weights_are_drawn_in_this_order() -> None:
    module, generator = MergeModule(16), torch.Generator().manual_seed(8)
    module.initialise(0.5, torch.Generator().manual_seed(8))
    for layer in (module.linear_kv, module.linear_o):
        weight, bias = uniform(layer, 0.25, generator)
        assert torch.equal(layer.weight, weight)
        assert torch.equal(layer.bias, bias)
    assert torch.equal(module.query, torch.empty(4, 4).normal_(0.0, 0.02, generator=generator))


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_the_linear_form_equals_its_formula(length: int, torch_rng: torch.Generator) -> None:
    module = module_of("linear", 8, 2, torch.float64)
    span = spans_of(1, length, 8, torch_rng).double()
    joined = span.flatten().tolist() + [0.0] * (8 * (4 - length))
    want = torch.tensor(
        layer_norm(linear(joined, module.linear_o), module.norm_o), dtype=torch.float64
    )
    assert torch.allclose(module(span, torch.tensor([length]))[0], want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [4, 16, 64])
def test_has_one_layer_over_four_tokens(size: int) -> None:
    module = MergeModule(size, kind="linear")
    assert isinstance(module, LinearMerge)
    assert sum(p.numel() for p in module.parameters()) == 4 * size * size + 3 * size
