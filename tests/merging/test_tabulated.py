"""The tabulated merge path against the module itself (reliability 8)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from support.merge_modules import give_rows, module_of
from umim_core.backbone.backbone import wrap_backbone
from umim_core.errors import ConfigError
from umim_core.merging.span_cache import TabulatedMerger
from umim_core.rules.grams import LONGEST

VOCAB, SIZE = 29, 16
TABULATED = {  # and the offsets of their tables
    "paper": 1,
    "learned": LONGEST,
    "linear": LONGEST,
    "learned, last residual": LONGEST,
    "linear, exponential residual": LONGEST,
}


def lookup(weight: torch.Tensor) -> nn.Embedding:
    """Embeddings of ids by a matrix [V, d]."""
    return nn.Embedding.from_pretrained(weight)


@pytest.mark.parametrize("form", TABULATED)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize(("chunk", "rows"), [(7, True), (8192, False)])
def test_equals_the_direct_path(
    form: str,
    dtype: torch.dtype,
    tolerance: float,
    chunk: int,
    rows: bool,
    torch_rng: torch.Generator,
) -> None:
    module = module_of(form, SIZE, 4, dtype).requires_grad_(True)
    weight = torch.randn(VOCAB, SIZE, generator=torch_rng).to(dtype)
    span_ids = torch.randint(VOCAB, (40, LONGEST), generator=torch_rng)
    lengths = torch.arange(40) % LONGEST + 1  # every length
    if rows:
        spans = zip(span_ids[8:24].tolist(), lengths[8:24].tolist(), strict=True)
        give_rows(module, [tuple(ids[:n]) for ids, n in spans if n > 1])
    merger = TabulatedMerger.of(module, lookup(weight), VOCAB, chunk)
    assert merger.table.shape == (VOCAB, TABULATED[form], SIZE)
    got, direct = merger(span_ids, lengths), module(weight[span_ids], lengths, span_ids)
    assert got.dtype == dtype and not got.requires_grad
    assert torch.allclose(got, direct, rtol=0, atol=tolerance)


@pytest.mark.parametrize("form", ["depth 3", "depth 3, learned"])
def test_a_form_whose_tokens_look_at_their_neighbours_is_refused(form: str) -> None:
    with pytest.raises(ConfigError, match="on its own to be tabulated; got depth 3"):
        TabulatedMerger.of(module_of(form, SIZE), lookup(torch.zeros(VOCAB, SIZE)), VOCAB)


def test_serves_a_half_precision_backbone(
    tiny_model: Callable[[str, int], PreTrainedModel],
) -> None:
    backbone = wrap_backbone(tiny_model("llama", 0).bfloat16(), None)
    module = module_of("paper", SIZE)
    span_ids, lengths = torch.tensor([[1, 2, 3]]), torch.tensor([3])
    got = TabulatedMerger.of(module, backbone.embed, backbone.vocab_size)(span_ids, lengths)
    direct = module(backbone.embed(span_ids), lengths)
    assert got.dtype == torch.float32
    assert torch.allclose(got, direct, rtol=0, atol=1e-6)
