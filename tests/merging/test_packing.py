"""Packing and unit embeddings against naive constructions."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from umim_core.backbone.backbone import Backbone
from umim_core.errors import ConfigError, CorpusError
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.merging.packing import PackedUnits, Segmentation, pack_rows
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet


def cut(lengths: list[int]) -> Segmentation:
    sizes = np.array(lengths, dtype=np.int64)
    return np.cumsum(sizes) - sizes, sizes


def pack(rows: list[list[int]], units: list[list[int]]) -> PackedUnits:
    return pack_rows([np.array(row, dtype=np.int32) for row in rows], [cut(u) for u in units])


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    units = draw(st.lists(st.lists(st.integers(1, 4), max_size=8), max_size=5))
    return [[draw(st.integers(0, 3)) for _ in range(sum(row))] for row in units], units


def module_for(backbone: Backbone) -> MergeModule:
    module = MergeModule(backbone.hidden_size)
    module.initialise(backbone.embedding_std, torch.Generator().manual_seed(2))
    return module.requires_grad_(False)


@given(case=batches())
def test_every_field_equals_the_naive_construction(
    case: tuple[list[list[int]], list[list[int]]],
) -> None:
    rows, units = case
    packed, longest = pack(rows, units), max(map(len, units), default=0)
    ids, starts, spans = [], [], []
    for row, sizes in zip(rows, units, strict=True):
        first = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
        pieces = [row[a : a + size] for a, size in zip(first, sizes, strict=True)]
        padding = [0] * (longest - len(sizes))
        starts.append(first + padding)
        ids.append([piece[0] if len(piece) == 1 else 0 for piece in pieces] + padding)
        spans.append([piece if len(piece) > 1 else [] for piece in pieces] + [[] for _ in padding])
    assert (packed.token_ids.tolist(), packed.starts.tolist()) == (ids, starts)
    lengths = [sizes + [0] * (longest - len(sizes)) for sizes in units]
    assert packed.lengths.tolist() == lengths
    assert packed.attention_mask.tolist() == [[size > 0 for size in row] for row in lengths]
    assert packed.unit_counts.tolist() == list(map(len, units))
    assert packed.raw_counts.tolist() == list(map(len, rows))
    table = list(zip(packed.span_ids.tolist(), packed.span_lengths.tolist(), strict=True))
    assert not any(any(span[size:]) for span, size in table)
    known = [span[:size] for span, size in table]
    named = [[known[i] if i >= 0 else [] for i in row] for row in packed.span_index.tolist()]
    assert named == spans
    assert len(known) == len({tuple(span) for row in spans for span in row if span})


@pytest.mark.parametrize(
    "units",
    [[[1] * 6, [1] * 3], [[4, 2], [3]], [[2, 1, 3], [1, 2]], [[1, 1, 4], [3]], [[3, 3], [1, 1, 1]]],
    ids=["no-span", "all-spans", "mixed", "long-last", "one-row"],
)
def test_embeddings_equal_the_naive_construction(
    tiny_backbone: Backbone, units: list[list[int]]
) -> None:
    rows = [[3, 1, 4, 1, 5, 9], [2, 6, 5]]
    module = module_for(tiny_backbone)
    got = MergedModel(tiny_backbone, module, None).embed(pack(rows, units))
    for b, (ids, sizes) in enumerate(zip(rows, units, strict=True)):
        position = 0
        for s, size in enumerate(sizes):
            table = tiny_backbone.embedding_weight[ids[position : position + size]]
            want = table[0] if size == 1 else module(table[None], torch.tensor([size]))[0]
            assert torch.allclose(got[b, s], want, rtol=0, atol=1e-6)
            assert size > 1 or torch.equal(got[b, s], want)
            position += size


def test_without_spans_no_module_is_needed(tiny_llama: Backbone) -> None:
    packed, base = pack([[1, 2], [3]], [[1, 1], [1]]), MergedModel.without_merging(tiny_llama)
    assert torch.equal(base.embed(packed), tiny_llama.embed(packed.token_ids))
    assert packed.span_ids.shape[0] == 0
    with pytest.raises(ConfigError, match="merged units need a merge module"):
        base.embed(pack([[1, 2]], [[2]]))


def test_rules_that_the_module_is_not_made_for_are_refused(tiny_llama: Backbone) -> None:
    with pytest.raises(ConfigError, match="rules need a merge module"):
        MergedModel(tiny_llama, None, Matcher(RuleSet.from_spans([(1, 2)])))
    long = Matcher(RuleSet.from_spans([(1, 2), (1, 2, 3, 4, 5)]))
    with pytest.raises(ConfigError, match="at most 4 tokens, as those of the module; got 5"):
        MergedModel(tiny_llama, module_for(tiny_llama), long)


def test_gradients_flow_to_merged_units_only_and_types_are_the_backbones(
    tiny_llama: Backbone,
) -> None:
    module = module_for(tiny_llama).double().requires_grad_(True)
    embeddings = MergedModel(tiny_llama, module, None).embed(pack([[1, 2, 3]], [[2, 1]]))
    assert embeddings.dtype is tiny_llama.dtype
    raw = torch.autograd.grad(embeddings[0, 1].sum(), module.linear_o.weight, retain_graph=True)[0]
    # of a LayerNorm's output any sum over all components is constant
    merged = torch.autograd.grad(embeddings[0, 0, 0], module.linear_o.weight)[0]
    assert raw.count_nonzero() == 0 < merged.count_nonzero()


@pytest.mark.parametrize(
    ("starts", "lengths"),
    [([0, 2], [2, 1]), ([0, 1], [2, 2]), ([2, 0], [2, 2]), ([0, 0, 2], [0, 2, 2]), ([], [])],
)
def test_units_that_do_not_cover_their_row_are_refused(
    starts: list[int], lengths: list[int]
) -> None:
    units = np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64)
    message = f"units of 1 to 16 tokens must cover every .*; got {sum(lengths)} of 4 tokens"
    with pytest.raises(CorpusError, match=message):
        pack_rows([np.arange(4)], [units])
