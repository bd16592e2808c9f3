"""``python -m flows``: what it prints and how it fails; every recipe that comes along."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import Result
from prefect import flow
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from typer.testing import CliRunner

from flows import pipeline_flows
from flows.cli import _without_traceback, app
from flows.parts import plan
from flows.planner import memory_of_cells
from support.processes import ROOT
from support.small_recipe import least_recipe
from tasks.cluster.lease import ClusterLease
from tasks.run.pipeline import PipelineRun
from tasks.run.prefect_runs import prefect_must_answer
from tasks.run.recipes import RECIPES, find_recipe, recipe_names
from tasks.stages.mine import given_rules_stage
from tasks.stages.named import NamedRules, NamedTokenizer
from umim_core.checkpoint.checkpoint_files import resolve_checkpoint
from umim_core.config.recipe import Recipe
from umim_core.errors import (
    BackboneError,
    ClusterError,
    ConfigError,
    CorpusError,
    ResourceLimitError,
)

RESULTS = ROOT / "docs" / "results"
ABSENT = {"kind": "text", "paths": ["nowhere.txt"]}
PART = ("--flow", "mine", "--dry-run")


def flows(*arguments: str) -> Result:
    """Run a command in this process; its error is ``exception``."""
    return CliRunner().invoke(app, arguments)


def test_recipes_are_listed_a_line_each_that_fits_a_terminal() -> None:
    lines = flows("recipes").stdout.splitlines()
    assert {line.split()[0] for line in lines} >= {"embedded", "tables/humaneval-smollm2"}
    assert max(map(len, lines)) <= 100
    assert len({len(re.match(r"\S+ +", line)[0]) for line in lines}) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "embeded"), "recipe must be one of"),
        (("run", "nosuch.yaml"), "a recipe file must exist"),
        (("run", "tables/humaneval-smollm2", *PART), "--flow mine with humaneval-smollm2"),
        (("run", "adaptation/docstrings-llama", *PART), "--flow mine with docstrings-llama"),
    ],
)
def test_an_unknown_recipe_or_a_part_of_one_without_parts_is_refused(
    arguments: tuple[str, ...], message: str
) -> None:
    error = flows(*arguments).exception
    assert isinstance(error, ConfigError) and message in str(error)


def test_without_a_server_the_function_of_a_flow_is_called_and_its_stages_are_no_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with temporary_settings({PREFECT_API_URL: None}):
        assert pipeline_flows._called(pipeline_flows.mine) is pipeline_flows.mine.fn
    recipe, silent = least_recipe(), SimpleNamespace(stage_run=lambda *_, **__: None, live=print)
    monkeypatch.setattr("tasks.run.pipeline.task", None)
    run: Any = PipelineRun(recipe, tmp_path, ClusterLease(recipe.cluster), silent, "key")
    rules = NamedRules(str(resolve_checkpoint("umim-docs-llama") / "rules"))
    made = run.stage(given_rules_stage(tokenizer=NamedTokenizer("umim-docs-llama"), rules=rules))
    assert made.executed and (made.path / "rules").is_dir()


@pytest.mark.parametrize(("error", "shown"), [(ConfigError("x"), False), (KeyError("x"), True)])
def test_an_error_that_says_what_to_do_is_logged_without_traceback(
    error: Exception, shown: bool
) -> None:
    record = logging.makeLogRecord({"exc_info": (type(error), error, None)})
    assert _without_traceback(record) and bool(record.exc_info) is shown


@pytest.mark.parametrize(
    ("backbone", "remedy"),
    [
        ("umim-docs-lama", "Did you mean 'umim-docs-llama'?"),
        ("./nowhere", "Check the path."),
        ("no model", ""),
    ],
)
def test_a_dry_run_refuses_a_backbone_that_does_not_exist(
    tmp_path: Path, backbone: str, remedy: str
) -> None:
    recipe = least_recipe(cells=[{"backbone": backbone}])
    (tmp_path / "own.yaml").write_text(recipe.model_dump_json(exclude_unset=True), "utf-8")
    done = flows("run", str(tmp_path / "own.yaml"), "--dry-run")
    assert isinstance(done.exception, BackboneError)
    assert repr(backbone) in str(done.exception) and done.exception.remedy == remedy


def test_a_dry_run_of_a_table_refuses_a_text_that_does_not_exist(tmp_path: Path) -> None:
    table = {"name": "own", "kind": "table", "table": "tab:own", "checkpoint": "own/planned/wt"}
    done = flows("run", write({**table, "texts": {"a": {"source": ABSENT}}}, tmp_path), "--dry-run")
    assert isinstance(done.exception, CorpusError) and "got nowhere.txt" in str(done.exception)


BASELINE = {"name": "another", "merge": "prompt", "method": "truncaton"}
ADAPT = {"sft": {"max_steps": 1}, "dpo": {"max_steps": 1}}
PAPERS = ("llama-3.1-8b", "llama-3.2-1b", "gpt2-xl", "deepscaler-1.5b")  # backbones


def load(name: str) -> Recipe:
    recipe = find_recipe(name)
    assert isinstance(recipe, Recipe)
    return recipe


def write(recipe: dict[str, object], folder: Path) -> str:
    path = folder / "changed.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", [*recipe_names(), *map(str, sorted(RESULTS.glob("*.yaml")))])
def test_a_recipe_has_the_name_of_its_file_a_plan_and_fits_its_gpus(name: str) -> None:
    recipe = find_recipe(name)
    assert recipe.name == Path(name).name.removesuffix(".yaml")
    assert recipe.description
    stages = [step["stage"] for step in plan(recipe)]
    assert "tokenize" in stages and {"corpus", "mixture"} & set(stages)
    if isinstance(recipe, Recipe):
        assert stages.count("distill") == len(recipe.cells)
        mined = [cell for cell in recipe.cells if cell.source == "frequency"]
        assert stages.count("count") == len({cell.backbone for cell in mined})
    cells = memory_of_cells(recipe)
    assert len(cells) == (len(recipe.cells) if recipe.cluster.use_gpu else 0)
    for cell in cells:
        cell.check()
        assert cell.fits
        assert 0 < cell.steps <= recipe.distill.max_steps


OTHERS = (*recipe_names("tables/"), *recipe_names("adaptation/"))


@pytest.mark.parametrize("name", [name for name in OTHERS if name.endswith(PAPERS)])
def test_a_table_at_the_papers_scale_has_a_dry_run_without_its_weights(name: str) -> None:
    assert flows("run", name, "--dry-run", "--json").exit_code == 0


def test_a_dry_run_prints_the_bound_on_memory_for_people() -> None:
    done = flows("run", "llama-3.1-8b-wikitext", "--dry-run")
    assert done.exit_code == 0, done.output
    for text in ("8 x NVIDIA RTX A6000", "steps at most", "memory of a GPU", "of 48, fits"):
        assert text in done.output


def test_a_dry_run_has_a_line_per_kind_of_stage_however_many_cells_there_are(
    tmp_path: Path,
) -> None:
    cells = [{"backbone": "umim-docs-llama", "tau": tau} for tau in range(3, 203)]
    path = write(least_recipe(cells=cells).model_dump(mode="json", exclude_unset=True), tmp_path)
    lines = flows("run", path, "--dry-run").output.splitlines()
    (filters,) = (line.split() for line in lines if line.startswith("filter "))
    assert filters[1] == "200" and len(lines) < 20
    steps = json.loads(flows("run", path, "--dry-run", "--json").output)["stages"]
    assert [step["stage"] for step in steps].count("filter") == 200


def test_a_training_that_does_not_fit_is_told_and_refused(tmp_path: Path) -> None:
    raw = load("llama-3.1-8b-wikitext").model_dump(mode="json", exclude_unset=True)
    raw["hardware"]["gpu_memory_gib"] = 16
    done = flows("run", write(raw, tmp_path), "--dry-run")
    assert "may not fit" in done.output
    assert isinstance(done.exception, ResourceLimitError)


def test_a_shape_that_is_not_the_backbones_or_not_known_is_refused() -> None:
    raw = load("embedded").model_dump(mode="json")
    hardware = load("llama-3.2-1b-wikitext").model_dump(mode="json")["hardware"]
    (other,) = hardware["shapes"].values()
    raw["distill"]["batch_size"] = 8
    raw |= {"cluster": {"workers": 8, "use_gpu": True}, "adapt": None, "benchmark": None}
    raw |= {"cells": [{"backbone": "umim-docs-llama"}]}
    raw |= {"hardware": hardware | {"shapes": {"umim-docs-llama": other}}}
    with pytest.raises(ConfigError, match="must agree with the configuration of umim-docs-llama"):
        memory_of_cells(Recipe.model_validate(raw))
    bare = load("llama-3.2-1b-wikitext").model_dump(mode="json")
    ((name, shape),), (cell,) = bare["hardware"]["shapes"].items(), bare["cells"]
    bare["hardware"]["shapes"]["mirror/model"] = shape
    changes = ({"backbone": "mirror/model"}, {"revision": "abc"})
    sure = {"backbone": name, "source": "confidence"}
    many = [cell, *(cell | change for change in changes), sure, sure | {"confidence_tokens": 5000}]
    labels = {cell.label for cell in memory_of_cells(Recipe.model_validate(bare | {"cells": many}))}
    assert len(labels) == 5
    bare["hardware"]["shapes"] = {}
    with pytest.raises(ConfigError, match="must tell the shape of a backbone that is not on this"):
        memory_of_cells(Recipe.model_validate(bare))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tables/humaneval-qwen", {"settings": [BASELINE]}, "Did you mean 'truncation'"),
        ("embedded", {"adapt": {**ADAPT, "settings": ["WT + Rulse"]}}, r"mean 'WT \+ Rules'"),
    ],
)
def test_settings_that_do_not_exist_are_refused(
    name: str, change: dict[str, object], message: str, tmp_path: Path
) -> None:
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text("utf-8"))
    with pytest.raises(ConfigError, match=message):
        find_recipe(write(recipe | change, tmp_path))


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/api", "no-address"])
def test_a_flow_whose_server_is_away_says_so(address: str) -> None:
    away = {PREFECT_API_URL: address, PREFECT_CLIENT_MAX_RETRIES: 0}
    with (
        temporary_settings(away),
        pytest.raises(ClusterError, match="Prefect's server must answer when a flow run begins"),
    ):
        pipeline_flows._called(flow(lambda: None))()


def test_another_error_of_a_flow_is_its_own() -> None:
    with pytest.raises(RuntimeError, match="of its own"), prefect_must_answer():
        raise RuntimeError("of its own")
