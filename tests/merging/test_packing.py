"""Packing and unit embeddings against naive constructions; surrogates that are kept."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.engine_matrix import build, module_for
from support.merge_modules import give_rows, module_of
from support.merged_models import units_of_lengths
from umim_core.backbone.backbone import Backbone
from umim_core.errors import ConfigError, CorpusError
from umim_core.merging.merged_model import MergedModel, SpanCache
from umim_core.merging.module import MergeModule
from umim_core.merging.packing import PackedUnits, pack_rows
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet


def pack(rows: list[list[int]], units: list[list[int]]) -> PackedUnits:
    ids = [np.array(row, dtype=np.int32) for row in rows]
    return pack_rows(ids, list(map(units_of_lengths, units)))


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    units = draw(st.lists(st.lists(st.integers(1, 4), max_size=8), max_size=5))
    return [[draw(st.integers(0, 3)) for _ in range(sum(row))] for row in units], units


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


def test_without_spans_no_module_is_needed(tiny_llama: Backbone) -> None:
    packed, base = pack([[1, 2], [3]], [[1, 1], [1]]), MergedModel.without_merging(tiny_llama)
    assert torch.equal(base.embed(packed), tiny_llama.embed(packed.token_ids))
    assert packed.span_ids.shape[0] == 0
    with pytest.raises(ConfigError, match="merged units need a merge module"):
        base.embed(pack([[1, 2]], [[2]]))
    wide = MergedModel(tiny_llama, MergeModule(tiny_llama.hidden_size).double(), None)
    assert wide.embed(pack([[1, 2, 3]], [[2, 1]])).dtype is tiny_llama.dtype


def test_rules_that_the_module_is_not_made_for_are_refused(tiny_llama: Backbone) -> None:
    with pytest.raises(ConfigError, match="rules need a merge module"):
        MergedModel(tiny_llama, None, Matcher(RuleSet.from_spans([(1, 2)])))
    long = Matcher(RuleSet.from_spans([(1, 2), (1, 2, 3, 4, 5)]))
    with pytest.raises(ConfigError, match="at most 4 tokens, as those of the module; got 5"):
        MergedModel(tiny_llama, MergeModule(tiny_llama.hidden_size), long)


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
    cache.find([(1, 2), (5, 6)])
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
