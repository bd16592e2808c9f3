"""An adapted checkpoint on its way into the package: its figures, its form, its card."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.tiny_adaptation import adaptation, point, points
from tasks.report.render import Report
from tasks.run.stage import StageSpec, run_stage
from tools import shipping
from tools.shipping import adapted_point
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import ConfigError
from umim_core.rules.ruleset import RuleSet

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


@pytest.mark.parametrize("of", [{"accuracy": 0.5}, {"seed": 2}, {"tau": 50}])
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
