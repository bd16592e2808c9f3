"""Baselines by name: their side and their model are those of the method that they make."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.reduced_texts import word_backbone
from umim_core.baselines.registry import BASELINES, find_baseline
from umim_core.errors import ConfigError
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet


@pytest.mark.parametrize("name", [name for name in BASELINES if BASELINES[name].own_model is None])
def test_a_method_has_the_side_and_the_model_that_its_entry_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # of evaluator heads
    rules = Matcher(RuleSet.from_spans([(1, 2)]))
    method = find_baseline(name).make(word_backbone("llama"), rules)
    assert (method.side, method.model) == (BASELINES[name].side, None)


def test_an_unknown_name_lists_all() -> None:
    with pytest.raises(ConfigError, match=r"must be one of cpc, ehpc.*mean 'truncation'"):
        find_baseline("truncations")
