"""``python -m flows``: what it prints and how it fails."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from click.testing import Result
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from flows import pipeline_flows
from flows.cli import app
from flows.launch import _called
from support.processes import run_command
from support.shared_services import PrefectServer
from support.small_recipe import least_recipe
from support.source_tree import ROOT
from tasks.cluster.lease import ClusterLease
from tasks.run.pipeline import PipelineRun
from tasks.stages.mine import given_rules_stage
from tasks.stages.named import NamedRules, NamedTokenizer
from umim_core.checkpoint.checkpoint_files import resolve_checkpoint
from umim_core.errors import BackboneError, ClusterError, ConfigError


def flows(*arguments: str) -> Result:
    """Run a command in this process; its error is ``exception``."""
    return CliRunner().invoke(app, arguments)


def test_report_of_the_papers_tables_is_what_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMIM_ROOT", str(tmp_path))
    done = flows("report", "--tables", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    committed = ROOT / "docs" / "results" / "paper-tables.md"
    assert Path(found["markdown"]).read_bytes() == committed.read_bytes()
    assert re.search(r"<h2[^>]*>tab:ppl", Path(found["html"]).read_text("utf-8"))
    assert {"label": "tab:ppl"}.items() <= found["tables"][1].items()


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
    ],
)
def test_unknown_recipe_says_what_there_is(arguments: tuple[str, ...], message: str) -> None:
    assert message in str(flows(*arguments).exception)


@pytest.mark.parametrize("recipe", ["tables/humaneval-smollm2", "adaptation/docstrings-llama"])
def test_a_recipe_without_parts_refuses_a_part(recipe: str) -> None:
    error = flows("run", recipe, "--flow", "mine", "--dry-run").exception
    assert isinstance(error, ConfigError) and f"--flow mine with {Path(recipe).name}" in str(error)


def test_without_a_server_the_function_of_a_flow_is_called_and_its_stages_are_no_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with temporary_settings({PREFECT_API_URL: None}):
        assert _called(pipeline_flows.mine) is pipeline_flows.mine.fn
    recipe, silent = least_recipe(), SimpleNamespace(stage_run=lambda *_, **__: None, live=print)
    monkeypatch.setattr("tasks.run.pipeline.task", None)
    run: Any = PipelineRun(recipe, tmp_path, ClusterLease(recipe.cluster), silent, "key")
    rules = NamedRules(str(resolve_checkpoint("umim-docs-llama") / "rules"))
    made = run.stage(given_rules_stage(tokenizer=NamedTokenizer("umim-docs-llama"), rules=rules))
    assert made.executed and (made.path / "rules").is_dir()


def test_a_flow_whose_server_is_away_says_so() -> None:
    def flow() -> None:
        raise httpx.ConnectError("no answer")

    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises(ClusterError, match="Prefect's server must answer when a flow run begins"),
    ):
        _called(cast(Any, flow))()


@pytest.mark.full
def test_an_error_inside_a_flow_shows_no_traceback(
    tmp_path: Path, prefect_server: PrefectServer, empty_store: Path
) -> None:
    source = {"kind": "text", "paths": [str(tmp_path / "absent.txt")]}
    recipe = {
        "name": "absent",
        "corpus": {"kind": "files", "train": source, "valid": source, "test": source},
        "cells": [{"backbone": "umim-docs-llama"}],
        "distill": {"max_steps": 1},
        "task": None,
    }
    (tmp_path / "absent.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    done = run_command(
        *(sys.executable, "-m", "flows", "run", tmp_path / "absent.yaml"),
        UMIM_ROOT=str(tmp_path / "root"),
        MLFLOW_TRACKING_URI=f"sqlite:///{shutil.copy(empty_store, tmp_path)}",
        PREFECT_API_URL=prefect_server.url,
    )
    assert done.returncode == 1
    assert "a corpus file must exist" in done.stderr
    assert "Traceback" not in done.stderr


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
    done = flows("run", str(own_recipe(tmp_path, backbone)), "--dry-run")
    assert isinstance(done.exception, BackboneError)
    assert repr(backbone) in str(done.exception) and done.exception.remedy == remedy


def own_recipe(folder: Path, backbone: str) -> Path:
    path = folder / "own.yaml"
    recipe = least_recipe(cells=[{"backbone": backbone}])
    path.write_text(recipe.model_dump_json(exclude_unset=True), encoding="utf-8")
    return path
