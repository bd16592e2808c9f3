"""``python -m flows``: what it prints and how it fails."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from click.testing import Result
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from flows import pipeline_flows
from flows.cli import _without_traceback, app
from flows.launch import _called
from support.small_recipe import least_recipe
from support.source_tree import ROOT
from tasks.cluster.lease import ClusterLease
from tasks.run.pipeline import PipelineRun
from tasks.stages.mine import given_rules_stage
from tasks.stages.named import NamedRules, NamedTokenizer
from umim_core.checkpoint.checkpoint_files import resolve_checkpoint
from umim_core.errors import BackboneError, ClusterError, ConfigError

PART = ("--flow", "mine", "--dry-run")


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
