"""A trained checkpoint on its way into the package: its form, its results, page and card."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from support.merge_modules import give_rows
from support.tiny_pipeline import Walk
from tools import shipping
from tools.shipping import found, store
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.recipe import Recipe
from umim_core.errors import ConfigError


@pytest.mark.parametrize("rows", [[], [(1, 2), (3, 4, 5)]], ids=["no rows", "rule rows"])
def test_a_stored_checkpoint_is_the_same_rounded(
    tiny_checkpoint: Path, tmp_path: Path, rows: list[tuple[int, ...]]
) -> None:
    given = Checkpoint.load(tiny_checkpoint)
    module = give_rows(given.module, rows) if rows else given.module
    given.with_contents(module, given.rules).save(tmp_path / "own")
    store(tmp_path / "own", tmp_path / "shipped")
    before, after = Checkpoint.load(tmp_path / "own"), Checkpoint.load(tmp_path / "shipped")
    assert after.config == before.config
    assert after.rules.digest == before.rules.digest
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
    def refuse(stored: Path) -> dict[str, Any]:
        raise ConfigError("must have been evaluated", "", "")

    def measure(stored: Path) -> dict[str, Any]:
        return {"name": stored.parent.name}

    shipped = tmp_path / "umim-tiny" / "checkpoint"
    shipped.mkdir(parents=True)
    (shipped / "old").touch()
    with monkeypatch.context() as patch, pytest.raises(ConfigError):
        if refused == "size":
            patch.setattr(shipping, "MAX_RULES_BYTES", 1)
        shipping.ship(tiny_checkpoint, shipped, refuse if refused == "results" else measure)
    assert [path.name for path in shipped.iterdir()] == ["old"]

    assert shipping.ship(tiny_checkpoint, shipped, measure) == {"name": "umim-tiny"}
    assert not (shipped / "old").exists()
    assert Checkpoint.load(shipped).rules.digest == Checkpoint.load(tiny_checkpoint).rules.digest


def test_a_broken_rule_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shipping", "./none"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(shipping.__file__, run_name="__main__")
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 1
    assert line.startswith("tools.shipping: error: a checkpoint that is named by its path must ex")


@pytest.mark.full  # a whole run is in its fixture
def test_what_belongs_to_a_checkpoint_is_found_as_its_recipe_says(tiny_run: Walk) -> None:
    recipe, (made,) = tiny_run.recipe, tiny_run.results
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
