"""The linear form against its formula."""

from __future__ import annotations

import pytest
import torch

from support.merge_modules import layer_norm, linear, module_of, spans_of, uniform
from umim_core.merging.module import LinearMerge, MergeModule


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_equals_the_formula_in_plain_arithmetic(length: int, torch_rng: torch.Generator) -> None:
    module = module_of("linear", 8, 2, torch.float64)
    span = spans_of(1, length, 8, torch_rng).double()
    joined = span.flatten().tolist() + [0.0] * (8 * (4 - length))
    want = torch.tensor(
        layer_norm(linear(joined, module.linear_o), module.norm_o), dtype=torch.float64
    )
    got = module(span, torch.tensor([length]))[0]
    assert torch.allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [4, 16, 64])
def test_has_one_layer_over_four_tokens(size: int) -> None:
    module = MergeModule(size, kind="linear")
    assert isinstance(module, LinearMerge)
    assert sum(p.numel() for p in module.parameters()) == 4 * size * size + 3 * size


def test_a_missing_token_counts_as_a_zero_embedding(torch_rng: torch.Generator) -> None:
    module, span = module_of("linear"), spans_of(1, 2, 16, torch_rng)
    padded = torch.cat([span, torch.zeros(1, 2, 16)], dim=1)
    want = module(padded, torch.tensor([4]))
    assert torch.equal(module(span, torch.tensor([2])), want)


def test_weights_are_drawn_in_this_order() -> None:
    module = MergeModule(16, kind="linear")
    module.initialise(0.5, torch.Generator().manual_seed(8))
    weight, bias = uniform(module.linear_o, 0.125, torch.Generator().manual_seed(8))
    assert torch.equal(module.linear_o.weight, weight)
    assert torch.equal(module.linear_o.bias, bias)
