"""A trained checkpoint on its way into the package: its form, its results, page and card."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from support.merge_modules import give_rows
from support.tiny_adaptation import adaptation, point, points
from support.tiny_pipeline import Walk
from tasks.report.render import Report
from tasks.run.stage import StageSpec, run_stage
from tools import shipping
from tools.shipping import adapted_point, found, store
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.recipe import Recipe
from umim_core.errors import ConfigError
from umim_core.rules.ruleset import RuleSet


@pytest.mark.parametrize("rows", [[], [(1, 2), (3, 4, 5)]], ids=["no rows", "rule rows"])
def test_a_stored_checkpoint_is_the_same_rounded_and_without_tables(
    tiny_checkpoint: Path, tmp_path: Path, rows: list[tuple[int, ...]]
) -> None:
    given = Checkpoint.load(tiny_checkpoint)
    module = give_rows(given.module, rows) if rows else given.module
    given.with_contents(module, given.rules).save(tmp_path / "own")
    for _ in range(2):  # what lies there is replaced
        store(tmp_path / "own", tmp_path / "shipped")
    before, after = Checkpoint.load(tmp_path / "own"), Checkpoint.load(tmp_path / "shipped")
    assert after.config == before.config
    assert after.rules.digest == before.rules.digest
    assert not (tmp_path / "shipped" / "rules" / "matcher").exists()
    stored = load_file(tmp_path / "shipped" / "model.safetensors")
    for name, value in before.module.state_dict().items():
        rounded = value if name == "rows.spans" else value.bfloat16()
        assert torch.equal(stored[name], rounded)
        assert torch.equal(after.module.state_dict()[name], rounded.to(value.dtype))


def test_prices_and_the_bound_of_decoding_ship(tiny_checkpoint: Path, tmp_path: Path) -> None:
    made = Checkpoint.load(tiny_checkpoint)
    prices = np.arange(len(made.rules), dtype=np.float32)
    rules = replace(made.rules, prices=prices)
    priced = made.with_contents(made.module, rules).decoding_under(1.0)
    priced.save(tmp_path / "priced")
    store(tiny_checkpoint, tmp_path / "shipped", priced=tmp_path / "priced")
    shipped = Checkpoint.load(tmp_path / "shipped")
    assert shipped.config == priced.config != made.config
    assert shipped.rules.require_prices().tolist() == prices.tolist()
    told = {"merge": "prompt", "raw_tail": 16}
    store(tmp_path / "shipped", tmp_path / "again", defaults=told)  # prices that are there stay
    assert Checkpoint.load(tmp_path / "again").config == priced.recommending(**told).config
    assert Checkpoint.load(tmp_path / "again").rules.require_prices().tolist() == prices.tolist()
    made.with_contents(made.module, rules.take(prices > 0)).save(tmp_path / "fewer")
    with pytest.raises(ConfigError, match=r"--priced must be what .*; got other rules"):
        store(tiny_checkpoint, tmp_path / "odd", priced=tmp_path / "fewer")
    assert not (tmp_path / "odd").exists()


@pytest.mark.parametrize("refused", ["size", "results"])
def test_what_ships_is_replaced_once_nothing_can_refuse_it(
    refused: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(stored: Path) -> str:
        raise ConfigError("must have been evaluated", "", "")

    def measure(stored: Path) -> str:
        return stored.parent.name

    shipped = tmp_path / "umim-tiny" / "checkpoint"
    shipped.mkdir(parents=True)
    (shipped / "old").touch()
    with monkeypatch.context() as patch, pytest.raises(ConfigError):
        if refused == "size":
            patch.setattr(shipping, "MAX_RULES_BYTES", 1)
        shipping.ship(tiny_checkpoint, shipped, refuse if refused == "results" else measure)
    assert [path.name for path in shipped.iterdir()] == ["old"]

    assert shipping.ship(tiny_checkpoint, shipped, measure) == "umim-tiny"
    assert not (shipped / "old").exists()
    assert Checkpoint.load(shipped).rules.digest == Checkpoint.load(tiny_checkpoint).rules.digest


@pytest.mark.full  # a whole run is in its fixture
def test_what_belongs_to_a_checkpoint_is_found_as_its_recipe_says(tiny_run: Walk) -> None:
    recipe, ((made,), _) = tiny_run.recipe, tiny_run.results
    assert isinstance(recipe, Recipe)
    checkpoint = made.settings["WT"].path / "checkpoint"
    cell, sources = found(checkpoint, recipe)
    assert cell.evaluations["WT"].metrics == made.evaluations["WT"].metrics
    assert (cell.tokenized.digest, len(sources.tasks)) == (made.tokenized.digest, 1)
    of_wt = {place: one for place, one in made.scores.items() if place[1] in ("WT", "base")}
    assert {place: one.metrics for place, one in cell.scores.items()} == {
        place: one.metrics for place, one in of_wt.items()
    }
    slower = recipe.distill.model_copy(update={"learning_rate": 0.004})
    (other,) = recipe.cells
    others = {"distill": slower, "cells": (other.model_copy(update={"residual": "last"}),)}
    for field, value in others.items():
        with pytest.raises(ConfigError, match="as it is now; got no stage distill of backbone"):
            found(checkpoint, recipe.model_copy(update={field: value}))
    with pytest.raises(ConfigError, match="a cell of the recipe tiny must have made"):
        found(made.settings["Task-Adapted"].path / "checkpoint", recipe)


METRICS = {"accuracy": 0.47, "difference": 0.02, "difference_se": 0.005, "token_reduction": 0.2}
RESULTS = "adaptation-tiny"


@pytest.fixture
def adapted(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint as stage dpo leaves it, scored by choice-scores as τ 5, seed 1 (first)."""
    made = Checkpoint.load(tiny_checkpoint)
    counts = {n: support + 5 for n, support in made.rules.support_by_order.items()}
    origin = made.rules.origin.with_options({"source": "frequency", "tau": 5})
    rules = RuleSet(made.rules.ids_by_order, counts, origin)
    config = made.config.model_copy(update={"training": {"steps": 40, "seed": 1}})
    found = replace(made, config=config, rules=rules)
    root = tmp_path / "root"

    def build(out: Path) -> dict[str, float]:
        found.save(out / "checkpoint")
        return {}

    trained = run_stage(root, StageSpec("dpo", 1, {"seed": 1}, {}), build)
    scored = {"model": {"setting": "Task-Adapted", "tau": 5, "seed": 1}}
    inputs = {"model.model": trained.digest, "questions.test": "t"}
    run_stage(root, StageSpec("choice-scores", 1, scored, inputs), lambda _: METRICS)
    return trained.path / "checkpoint"


def results(*more: Report) -> Report:
    """Results of two seeds, the first of them the checkpoint's."""
    others = [one for one in points() if (one["setting"], one["tau"]) != ("Task-Adapted", 5)]
    return adaptation([*others, point("Task-Adapted", 5, 0), *more], seeds=[1, 0])


def own(**of: object) -> Report:
    return point("Task-Adapted", 5, 1, **METRICS) | of


def test_its_point_is_found_by_what_was_measured_on_it(adapted: Path) -> None:
    place, found = adapted_point(adapted, results(own()))
    assert (place["checkpoint"], found["seed"]) == ("umim-small", 1)


@pytest.mark.parametrize("of", [{"accuracy": 0.5}, {"seed": 2}])
def test_results_of_another_run_are_refused(adapted: Path, of: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"must hold a point that was measured on .*checkpoint"):
        adapted_point(adapted, results(own(**of)))


def test_a_checkpoint_that_was_not_scored_is_refused(adapted: Path) -> None:
    shutil.rmtree(adapted.parents[2] / "choice-scores")
    with pytest.raises(ConfigError, match="must hold a point"):
        adapted_point(adapted, results(own()))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The committed results."""
    path = tmp_path / f"{RESULTS}.json"
    path.write_text(json.dumps(results(own())), "utf-8")
    return path


def test_it_ships_as_it_was_measured_and_notes_where_its_figures_are(
    adapted: Path, file: Path, tmp_path: Path
) -> None:
    shipped = tmp_path / "umim-tiny-adapted" / "checkpoint"
    shipping.ship_adapted(adapted, shipped, file)
    before, after = Checkpoint.load(adapted), Checkpoint.load(shipped)
    for name, value in before.module.state_dict().items():
        assert torch.equal(after.module.state_dict()[name], value)
    assert after.rules.digest == before.rules.digest
    noted = {"setting": "Task-Adapted", "start": "umim-small", "results": RESULTS}
    assert after.config.training == before.config.training | noted


def test_what_ships_stays_where_results_or_size_are_refused(
    adapted: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "umim-tiny-adapted" / "checkpoint"
    shipped.mkdir(parents=True)
    (shipped / "old").touch()
    other = file.with_name("adaptation-other.json")
    other.write_text(json.dumps(results()), "utf-8")
    with pytest.raises(ConfigError, match="must hold a point"):
        shipping.ship_adapted(adapted, shipped, other)
    other.write_text(json.dumps(results(own()) | {"seeds": [0, 1]}), "utf-8")
    with pytest.raises(ConfigError, match="must be of the first seed"):
        shipping.ship_adapted(adapted, shipped, other)
    monkeypatch.setattr(shipping, "MAX_RULES_BYTES", 1)
    with pytest.raises(ConfigError, match="at most 1 bytes"):
        shipping.ship_adapted(adapted, shipped, file)
    assert [path.name for path in shipped.iterdir()] == ["old"]
