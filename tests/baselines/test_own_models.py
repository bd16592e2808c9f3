from __future__ import annotations

from pathlib import Path

import pytest

from support.reduced_texts import word_backbone
from umim_core.baselines.methods import BASELINES, OWN_MODELS, ReducedTokens
from umim_core.baselines.truncation import Truncation
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet


def in_one_registry_alone() -> set[str]:
    """Names whose method has a model that nothing names, and names of models of no baseline."""
    backbone, rules = word_backbone("llama"), Matcher(RuleSet.from_spans([(1, 2)]))
    methods, models = set(BASELINES.names()), set(OWN_MODELS.names())
    made = {name: BASELINES.find(name)(backbone, rules) for name in methods - models}
    return {name for name, method in made.items() if method.model is not None} | (models - methods)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # of evaluator heads


def test_every_model_of_a_baselines_own_is_in_both_registries() -> None:
    assert "llmlingua2" in OWN_MODELS.names()
    assert in_one_registry_alone() == set()


def test_a_name_in_one_registry_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    method = ReducedTokens(Truncation(), "owner/name@commit")
    monkeypatch.setitem(BASELINES._found, "not-named", lambda *_: method)
    monkeypatch.setitem(OWN_MODELS._found, "of-no-baseline", lambda: "owner/name@commit")
    assert in_one_registry_alone() == {"not-named", "of-no-baseline"}
