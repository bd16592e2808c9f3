"""The model as one value: what it refuses, its base, and that nothing assumes unit positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from umim_core.backbone.backbone import Backbone
from umim_core.errors import ConfigError
from umim_core.merging.compressed import Compressed
from umim_core.merging.module import MergeModule
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

RULES = Matcher(RuleSet.from_spans([(1, 2), (3, 4, 5)]))


def test_rules_without_a_module_are_refused(tiny_llama: Backbone) -> None:
    with pytest.raises(ConfigError, match="rules need a merge module"):
        Compressed(tiny_llama, None, RULES, "compact")


def test_the_base_is_the_same_backbone_on_raw_tokens(tiny_llama: Backbone) -> None:
    model = Compressed(tiny_llama, MergeModule(tiny_llama.hidden_size), RULES, "preserved")
    ids = np.array([6, 1, 2, 3, 4, 5])
    assert model.segment(ids)[1].tolist() == [1, 2, 3]
    base = model.base()
    assert base.backbone is tiny_llama
    assert base.segment(ids)[1].tolist() == [1] * 6
    raw = tiny_llama.embed(torch.from_numpy(ids)[None])
    assert torch.equal(base.embed(base.pack([ids])), raw)
