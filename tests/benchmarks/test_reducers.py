"""The benchmark of token reducers: shares of the prefill, equal choices, methods not at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.common import Report, facts
from benchmarks.reducers.__main__ import equal, main
from benchmarks.reducers.reducer_costs import make_reducers, measure, merge_flops, times_of
from docs.make.results import benchmark_page
from support.tiny_models import random_backbone
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.methods import Ints, Text
from umim_core.baselines.truncation import Truncation
from umim_core.errors import ConfigError
from umim_core.merging.compressed import Compressed
from umim_core.merging.module import MergeModule
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

LENGTH, TARGET = 40, 0.25
IDS = np.tile(np.array([1, 2, 3, 4], dtype=np.int64), LENGTH // 4)
NAMES = ["truncation", "selective-context"]


def tiny_umim_of(backbone: Backbone) -> Compressed:
    """A fresh module with one rule that matches a quarter of the text's neighbours."""
    module = MergeModule(backbone.hidden_size)
    module.initialise(backbone.embedding_std, torch.Generator().manual_seed(0))
    return Compressed(backbone, module, Matcher(RuleSet.from_spans([(1, 2)])), "compact")


class Fickle(Truncation):
    """A reducer of this test that keeps other tokens every time."""

    def __init__(self) -> None:
        self._calls = 0

    def keep(self, text: Text, budget: int) -> Ints:
        self._calls += 1
        return np.arange(budget) + self._calls % 2


@pytest.fixture(scope="module")
def report() -> Report:
    given = tiny_umim_of(random_backbone())
    reducers, missing = make_reducers(NAMES, given)
    case = measure(given, reducers, IDS, TARGET, 2)
    wrong = measure(given, {"fickle": Fickle()}, IDS, TARGET, 2)
    return {
        "benchmark": "reducers",
        "facts": facts(("torch",), "abc"),
        "subject": {"backbone": "tiny", "rules": 7, "text": "random phrases"},
        "device": "cpu",
        "dtype": "float32",
        "not_run": missing | {"llmlingua2": "no classifier"},
        "cases": {"40 tokens, 25%": case},
        "wrong": {"cases": {"40 tokens, 25%": wrong}},
        "equal": True,
    }


def test_totals_are_compressing_and_what_is_left_by_rounds() -> None:
    seconds = {"base": [2.0, 4.0, 4.0], "left": [1.0, 3.0, 2.0], "own": [0.5, 2.0, 1.0]}
    found = times_of(seconds, "own", "left")
    medians = {name: found[name]["median"] for name in ("seconds", "share", "left", "total")}
    assert medians == {"seconds": 1.0, "share": 0.25, "left": 0.5, "total": 0.75}


def test_every_method_meets_the_target_and_has_its_cost(report: Report) -> None:
    rows: dict[str, Any] = report["cases"]["40 tokens, 25%"]["methods"]
    assert list(rows) == ["truncation", "selective-context", "umim"]
    assert [rows[name]["kept"] for name in NAMES] == [30, 30]
    assert rows["umim"]["kept"] == 30 and rows["umim"]["token_reduction"] == TARGET
    assert rows["truncation"]["flops_total"] == rows["truncation"]["flops_left"] < 1
    assert rows["selective-context"]["flops_total"] > 1  # it reads the whole text itself


def test_the_operations_of_merging_are_those_of_its_different_spans() -> None:
    """Linear_kv and query per token, Linear_o per span; 1 2 comes twice and is merged once."""
    given, size, width = tiny_umim_of(random_backbone()), random_backbone().hidden_size, 2
    ids = np.array([1, 2, 5, 1, 2, 6], dtype=np.int64)
    pooling = 2 * 2 * width * size  # scores, and the weighted sum
    assert merge_flops(given, ids) == 2 * width * size**2 + pooling + 2 * size**2
    assert merge_flops(given, ids[2:3]) == 0


def test_a_reducer_that_keeps_other_tokens_is_noticed(report: Report) -> None:
    assert equal(report)
    assert not equal(report["wrong"])


def test_the_page_says_what_pays_and_what_was_not_run(report: Report) -> None:
    text = benchmark_page(report)
    assert "| selective-context |" in " ".join(text.split()), text
    assert "25.0" in text and "in all repetitions: yes." in text
    assert "`llmlingua2`, not run: no classifier" in text


@pytest.mark.full
def test_cases_are_kept_by_their_whole_target_and_rounds(tmp_path: Path) -> None:
    out = tmp_path / "reducers.json"
    words = ["--checkpoint", "umim-docs-llama", "--lengths", "48", "--methods", "truncation"]
    words += ["--commit", "abc", "--device", "cpu", "--out", str(out)]
    assert main([*words, "--rounds", "1", "--target-tr", "0.14", "0.145"]) == 0
    found = json.loads(out.read_text("utf-8"))
    assert [case["target"] for case in found["cases"].values()] == [0.14, 0.145]
    first = found["cases"]["48 tokens, TR 0.14"]
    for rounds, same in (("1", True), ("2", False)):
        assert main([*words, "--rounds", rounds, "--target-tr", "0.14"]) == 0
        again = json.loads(out.read_text("utf-8"))["cases"]
        assert (again["48 tokens, TR 0.14"] == first) == same


def test_a_token_reduction_of_all_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="above 0 and below 1"):
        main(["--target-tr", "1.0", "--checkpoint", "no-such-checkpoint"])


def test_other_methods_than_token_reducers_are_refused(report: Report) -> None:
    given = tiny_umim_of(random_backbone())
    with pytest.raises(ConfigError, match="must be a token reducer"):
        make_reducers(["mean-embedding"], given)


def test_a_method_whose_model_is_not_at_hand_is_left_out() -> None:
    reducers, missing = make_reducers(["ehpc", "truncation"], tiny_umim_of(random_backbone()))
    assert list(reducers) == ["truncation"]
    assert "in-memory has none" in missing["ehpc"]  # it probes by text: no tokenizer
