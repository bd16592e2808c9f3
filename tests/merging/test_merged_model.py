"""The model as one value: what it refuses, its base, and that nothing assumes unit positions."""

from __future__ import annotations

import pytest

from umim_core.backbone.backbone import Backbone
from umim_core.errors import ConfigError
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

RULES = Matcher(RuleSet.from_spans([(1, 2), (3, 4, 5)]))


def test_rules_without_a_module_are_refused(tiny_llama: Backbone) -> None:
    with pytest.raises(ConfigError, match="rules need a merge module"):
        MergedModel(tiny_llama, None, RULES, "compact")
