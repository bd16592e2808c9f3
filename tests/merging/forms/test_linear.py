"""The linear form against its formula."""

from __future__ import annotations

import pytest
import torch

from support.merge_modules import layer_norm, linear, module_of, spans_of
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
