from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.examples import attention_maps
from support.merge_modules import module_of
from umim_core.backbone.backbone import Backbone
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

IDS = np.array([5, 1, 2, 9, 3, 4, 7])  # units 5 | 1 2 | 9 | 3 4 | 7
UNITS = [[0], [1, 2], [3], [4, 5], [6]]
RULES = Matcher(RuleSet.from_spans([(1, 2), (3, 4)], tokenizer_fingerprint=None))


def reference(backbone: Backbone) -> np.ndarray:
    """Raw attention of transformers' last layer, summed and picked in loops."""
    previous = backbone.model.config._attn_implementation
    backbone.model.set_attn_implementation("eager")
    with torch.no_grad():
        out = backbone.model(input_ids=torch.tensor(IDS)[None], output_attentions=True)
    backbone.model.set_attn_implementation(previous)
    weights = out.attentions[-1][0].mean(dim=0)
    return np.array([[sum(float(weights[q[-1], k]) for k in key) for key in UNITS] for q in UNITS])


def test_before_is_raw_attention_added_up_by_unit(tiny_backbone: Backbone) -> None:
    model = MergedModel(tiny_backbone, module_of("paper"), RULES)
    before, after, lengths = attention_maps(IDS, model)
    assert before == pytest.approx(reference(tiny_backbone), abs=1e-6)
    assert after.sum(axis=1) == pytest.approx(1.0) and lengths == [1, 2, 1, 2, 1]
