"""Anchors in plain arithmetic, and what a module with a residual adds to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.merge_modules import spans_of
from umim_core.merging.forms.span_ops import ANCHORS, exponential_embedding, last_embedding
from umim_core.merging.module import MergeModule

LENGTHS = torch.tensor([1, 2, 3, 4])


def test_last_takes_the_last_token_of_each_span(torch_rng: torch.Generator) -> None:
    spans = spans_of(4, 4, 8, torch_rng)
    want = torch.stack([spans[0, 0], spans[1, 1], spans[2, 2], spans[3, 3]])
    assert torch.equal(last_embedding(spans, LENGTHS), want)


def test_exponential_doubles_the_weight_from_token_to_token(torch_rng: torch.Generator) -> None:
    spans = spans_of(4, 4, 8, torch_rng).double()
    one, two, three, four = spans
    want = torch.stack(
        [
            one[0],
            (two[0] + 2 * two[1]) / 3,
            (three[0] + 2 * three[1] + 4 * three[2]) / 7,
            (four[0] + 2 * four[1] + 4 * four[2] + 8 * four[3]) / 15,
        ]
    )
    assert torch.allclose(exponential_embedding(spans, LENGTHS), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("form", [{}, {"depth": 3}, {"kind": "linear"}], ids=str)
def test_a_residual_module_adds_its_own_output_to_the_anchor(
    anchor: Any, form: dict[str, Any], torch_rng: torch.Generator
) -> None:
    alone, added = MergeModule(16, **form), MergeModule(16, **form, residual=anchor)
    alone.initialise(0.1, torch_rng)
    added.load_state_dict(alone.state_dict())
    spans = spans_of(4, 4, 16, torch_rng)
    want = ANCHORS[anchor](spans, LENGTHS) + alone(spans, LENGTHS)
    assert torch.allclose(added(spans, LENGTHS), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("anchor", ANCHORS)
def test_padding_has_no_influence(anchor: str, torch_rng: torch.Generator) -> None:
    spans, lengths = spans_of(2, 2, 8, torch_rng), torch.tensor([2, 1])
    padded = torch.cat([spans, torch.full((2, 2, 8), torch.nan)], dim=1)
    assert torch.equal(ANCHORS[anchor](padded, lengths), ANCHORS[anchor](spans, lengths))
