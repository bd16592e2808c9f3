"""Baselines on the way from a recipe to comparison rows, on the tiny pipeline."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from support.tiny_pipeline import Walk, tiny_recipe, walk
from tasks.report.compare import comparison_rows
from tasks.report.comparison import ComparisonRow
from tasks.report.comparison_table import comparison
from tasks.run.checks import check_baselines
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.methods import (
    BASELINES,
    EvictedColumns,
    HeldColumns,
    Ints,
    ReducedTokens,
    Text,
)
from umim_core.config.recipe import DEFAULT_TASK
from umim_core.errors import ConfigError
from umim_core.rules.matcher import Matcher

TRUNCATION, MEAN, FULL = "truncation", "mean-embedding", "full-cache"
SPANS, RANDOM = "span-eviction-0", "random-spans"


class EveryOther:
    """A method of this test: protected tokens, then tokens at even places, then the first."""

    exact = True

    def keep(self, text: Text, budget: int) -> Ints:
        places = np.arange(len(text.ids))
        order = np.lexsort((places, places % 2, ~text.protected))
        return np.sort(order[:budget])


class Newest:
    """A policy of this test: the newest columns stay."""

    reads_attention: ClassVar[bool] = False
    rotation: ClassVar[None] = None

    def survivors(self, held: HeldColumns, budget: int) -> Tensor:
        heads, columns = held.keys.shape[:2]
        return torch.arange(columns - budget, columns).expand(heads, -1)


def every_other(backbone: Backbone, matcher: Matcher) -> ReducedTokens:
    return ReducedTokens(EveryOther())


def newest(backbone: Backbone, matcher: Matcher) -> EvictedColumns:
    return EvictedColumns(lambda ids: Newest())


ADDED = {"every-other": every_other, "newest": newest}


@pytest.fixture(scope="module")
def run(tiny_run: Walk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    """The tiny run once more, with baselines: their stages and nothing else are built."""
    root = tmp_path_factory.mktemp("baselines") / "root"
    shutil.copytree(tiny_run.root, root)
    recipe = tiny_run.recipe.model_copy(
        update={"baselines": (TRUNCATION, MEAN, FULL, SPANS, RANDOM, *ADDED)}
    )
    with pytest.MonkeyPatch.context() as patch:
        known = {name: BASELINES.find(name) for name in BASELINES.names()}
        patch.setattr(BASELINES, "_found", known)
        for name, make in ADDED.items():
            BASELINES.add(name)(make)
        yield walk(root, recipe)


@pytest.fixture(scope="module")
def rows(run: Walk) -> dict[str, ComparisonRow]:
    found = comparison_rows(*run.results, seed=0)
    return {row.method: row for row in found if row.setting == "WT"}


@pytest.mark.full
def test_a_baseline_of_one_file_has_a_row_of_its_own(rows: dict[str, ComparisonRow]) -> None:
    assert set(rows) == {"umim", TRUNCATION, MEAN, FULL, SPANS, RANDOM, *ADDED}
    for name in ADDED:
        row = rows[name]
        assert row.params()["method"] == name
        assert row.measured()["ppl_half_umim"] > 1
        assert row.score("WT", DEFAULT_TASK) is not None
    shown = comparison(list(rows.values())).rows
    assert sum("every-other" in line for line in shown) == 1


@pytest.mark.full
def test_deleted_tokens_are_as_many_as_merging_saves(rows: dict[str, ComparisonRow]) -> None:
    merged = rows[MEAN].scores[DEFAULT_TASK, "WT"]["token_reduction"]
    assert merged.value > 0
    for name in (TRUNCATION, RANDOM, "every-other"):
        assert rows[name].scores[DEFAULT_TASK, "WT"]["token_reduction"] == merged
    reduced = rows[TRUNCATION].metric("token_reduction")
    assert reduced == rows["every-other"].metric("token_reduction")
    assert reduced == rows[RANDOM].metric("token_reduction")
    assert reduced == rows["newest"].metric("cache_reduction")


@pytest.mark.full
def test_merged_spans_are_measured_like_the_module(rows: dict[str, ComparisonRow]) -> None:
    ours, mean = rows["umim"], rows[MEAN]
    same = ("token_reduction", "ppl_base", "ppl_half_base")
    assert [ours.metric(name) for name in same] == [mean.metric(name) for name in same]
    timed = {"rules", "prefill_speedup", "decode_speedup"}
    assert set(ours.measured()) - timed == set(mean.measured())
    assert ours.metric("kl") != mean.metric("kl")


@pytest.mark.full
def test_span_eviction_is_measured_like_the_module_but_reduces_the_cache_alone(
    rows: dict[str, ComparisonRow],
) -> None:
    mean, evicted = rows[MEAN].measured(), rows[SPANS].measured()
    assert set(evicted) == set(mean) - {"token_reduction"} | {"cache_reduction"}
    assert 0.9 * mean["token_reduction"] < evicted["cache_reduction"] <= mean["token_reduction"]
    assert evicted["ppl_base"] == mean["ppl_base"] != evicted["ppl_umim"] != mean["ppl_umim"]
    tasks = rows[SPANS].scores[DEFAULT_TASK, "WT"]
    assert tasks["token_reduction"].value == 0


@pytest.mark.full
def test_the_full_cache_is_the_base_model(rows: dict[str, ComparisonRow]) -> None:
    full = rows[FULL]
    assert full.metric("cache_reduction") == 0
    assert full.metric("ppl_half_umim") == pytest.approx(full.metric("ppl_half_base"), rel=1e-5)
    assert full.score("WT", DEFAULT_TASK) == full.score("base", DEFAULT_TASK)
    dropped = rows["newest"].metric("ppl_half_umim")
    assert dropped != pytest.approx(full.metric("ppl_half_base"), rel=1e-5)


def test_an_unknown_baseline_is_refused_before_anything_runs(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path).model_copy(update={"baselines": ("truncaton",)})
    with pytest.raises(ConfigError, match=r"full-cache, h2o, last-embedding.*mean 'truncation'"):
        check_baselines(recipe)
