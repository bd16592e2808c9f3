"""Units that cannot be packed, and the layout of a worked example."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from umim_core.backbone.backbone import Backbone
from umim_core.errors import ConfigError, CorpusError
from umim_core.merging.decode_states import BranchLayout, branch_layout
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


def module_for(backbone: Backbone) -> MergeModule:
    module = MergeModule(backbone.hidden_size)
    module.initialise(backbone.embedding_std, torch.Generator().manual_seed(2))
    return module.requires_grad_(False)


def test_spans_without_a_module_are_refused(tiny_llama: Backbone) -> None:
    with pytest.raises(ConfigError, match="merged units need a merge module"):
        MergedModel.without_merging(tiny_llama).embed(pack([[1, 2]], [[2]]))


def test_rules_that_the_module_is_not_made_for_are_refused(tiny_llama: Backbone) -> None:
    with pytest.raises(ConfigError, match="rules need a merge module"):
        MergedModel(tiny_llama, None, Matcher(RuleSet.from_spans([(1, 2)])))
    long = Matcher(RuleSet.from_spans([(1, 2), (1, 2, 3, 4, 5)]))
    with pytest.raises(ConfigError, match="at most 4 tokens, as those of the module; got 5"):
        MergedModel(tiny_llama, module_for(tiny_llama), long)


def test_surrogates_have_the_type_of_the_backbone_and_reach_the_module(
    tiny_llama: Backbone,
) -> None:
    module = module_for(tiny_llama).double().requires_grad_(True)
    out = MergedModel(tiny_llama, module, None).surrogates(
        torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 2])
    )
    assert out.dtype is tiny_llama.dtype
    out.square().sum().backward()
    assert module.query.grad is not None
    assert module.query.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("starts", "lengths", "message"),
    [
        ([0, 2], [2, 1], "cover every token .* once; got 3 of 4 tokens"),
        ([0, 2], [2, 3], "got 5 of 4 tokens"),
        ([0, 1], [2, 2], "cover every token"),
        ([2, 0], [2, 2], "cover every token"),
        ([0, 0, 0], [0, 2, 2], "cover every token"),
        ([0, 0, 2], [0, 2, 2], r"a unit must have 1 to 16 tokens; got 0\.\.2"),
        ([], [], "got 0 of 4 tokens"),
    ],
)
def test_units_that_do_not_cover_their_row_are_refused(
    starts: list[int], lengths: list[int], message: str
) -> None:
    units = np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64)
    with pytest.raises(CorpusError, match=message):
        pack_rows([np.arange(4)], [units])


def layout_of(ids: list[int], *spans: tuple[int, ...]) -> BranchLayout:
    matcher, row = Matcher(RuleSet.from_spans(spans)), np.array(ids)
    return branch_layout(pack_rows([row], [matcher.segment(row)]), matcher, "compact")


def test_layout_of_the_worked_example_with_a_rule_inside_another() -> None:
    layout = layout_of([0, 1, 2, 3, 4], (1, 2), (1, 2, 3, 4))
    assert layout.trunk.tolist() == [[True, False, False, False, True]]
    assert layout.lengths.tolist() == [[1, 1, 2, 1, 4]]
    assert layout.positions.tolist() == [[0, 1, 1, 2, 1]]
    assert layout.span_ids.tolist() == [[1, 2, 0, 0], [1, 2, 3, 4]]
    assert layout.surrogate.tolist() == [[-1, -1, 0, -1, 1]]
    assert (layout.mask(torch.float32)[0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [1, 0, 0, 0, 1],
    ]
