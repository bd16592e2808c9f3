"""Surrogates for inference, by tables and kept, against the module itself (reliability 8)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from support.engine_matrix import VOCAB, build, module_for
from support.merge_modules import give_rows, module_of
from umim_core.errors import ConfigError
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.span_cache import SpanCache, TabulatedMerger
from umim_core.rules.grams import LONGEST

SPANS = [(1, 2), (3, 4, 5), (2, 1), (1, 2, 3, 4), (1, 2)]


@pytest.mark.parametrize("rows", [(), SPANS[:2]], ids=["no rows", "rows"])
@pytest.mark.parametrize(
    ("form", "tabulated"),
    [("paper", True), ("learned", True), ("linear", True), ("depth 3", False)],
)
def test_every_form_gives_the_modules_own_surrogates(
    form: str, tabulated: bool, rows: list[tuple[int, ...]]
) -> None:
    backbone = build("llama")
    module = module_of(form, 32, 4, torch.float64)
    if rows:
        give_rows(module, rows)
    cache = SpanCache(MergedModel(backbone, module, None))
    assert (cache.table is not None) == tabulated
    for span, found in zip(SPANS, cache.find(SPANS), strict=True):
        direct = MergedModel(backbone, module, None).surrogates(
            torch.tensor([span]), torch.tensor([len(span)])
        )
        assert torch.allclose(found, direct[0], rtol=0, atol=1e-12)


TOKENS, SIZE = 29, 16
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
@pytest.mark.parametrize(
    ("chunk", "rows", "longest"), [(7, True, 4), (8192, False, 4), (8192, True, 9)]
)
def test_equals_the_direct_path(
    form: str,
    dtype: torch.dtype,
    tolerance: float,
    chunk: int,
    rows: bool,
    longest: int,
    torch_rng: torch.Generator,
) -> None:
    module = module_of(form, SIZE, 4, dtype, longest).requires_grad_(True)
    weight = torch.randn(TOKENS, SIZE, generator=torch_rng).to(dtype)
    span_ids = torch.randint(TOKENS, (40, longest), generator=torch_rng)
    lengths = torch.arange(40) % longest + 1  # every length
    if rows:
        spans = zip(span_ids[8:24].tolist(), lengths[8:24].tolist(), strict=True)
        give_rows(module, [tuple(ids[:n]) for ids, n in spans if n > 1])
    merger = TabulatedMerger.of(module, lookup(weight), TOKENS, chunk)
    offsets = longest if TABULATED[form] > 1 else 1
    assert merger.table.shape == (TOKENS, offsets, SIZE)
    got, direct = merger(span_ids, lengths), module(weight[span_ids], lengths, span_ids)
    assert got.dtype == dtype and not got.requires_grad
    assert torch.allclose(got, direct, rtol=0, atol=tolerance)


@pytest.mark.parametrize("form", ["depth 3", "depth 3, learned"])
def test_a_form_whose_tokens_look_at_their_neighbours_is_refused(form: str) -> None:
    with pytest.raises(ConfigError, match="on its own to be tabulated; got depth 3"):
        TabulatedMerger.of(module_of(form, SIZE), lookup(torch.zeros(TOKENS, SIZE)), TOKENS)


def test_a_table_beyond_its_limit_is_not_made() -> None:
    backbone = build("llama")
    module = module_for(backbone)
    size = VOCAB * 32 * 8
    assert SpanCache(MergedModel(backbone, module, None), table_bytes=size).table is not None
    small = SpanCache(MergedModel(backbone, module, None), table_bytes=size - 1)
    assert small.table is None
    assert torch.allclose(
        small.find(SPANS),
        SpanCache(MergedModel(backbone, module, None)).find(SPANS),
        rtol=0,
        atol=1e-12,
    )


def test_a_span_is_computed_once_and_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = build("llama", torch.float32)
    cache = SpanCache(MergedModel(backbone, module_for(backbone), None), kept_spans=3)
    computed: list[int] = []
    merge = cache.merge

    def counted(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        computed.append(len(ids))
        return merge(ids, lengths)

    monkeypatch.setattr(cache, "merge", counted)
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
