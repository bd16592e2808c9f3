"""What a flow run takes from Prefect, and what it does without its server."""

from __future__ import annotations

import logging
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext

from tasks.cluster import CHECKOUT
from tasks.prefect_runs import in_the_checkout, prefect_may_be_away, prefect_must_answer
from tasks.recipes import find_recipe
from umim_core.errors import ClusterError, ConfigError


def ask_a_closed_port() -> None:
    httpx.get("http://127.0.0.1:9", trust_env=False)


def test_pages_that_cannot_be_written_cost_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "umim.prefect"), prefect_may_be_away():
        ask_a_closed_port()
    assert "Prefect is away, its pages lack what was found" in caplog.text


def test_a_run_that_cannot_report_its_end_says_what_to_do() -> None:
    with (
        pytest.raises(ClusterError, match=r"flow run begins and ends; got .*finds"),
        prefect_must_answer(),
    ):
        ask_a_closed_port()


@pytest.mark.parametrize("deployed", [True, False])
def test_relative_paths_of_a_deployed_run_start_at_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deployed: bool
) -> None:
    monkeypatch.chdir(tmp_path)  # a worker starts every run in an empty folder
    flow_run = FlowRun(flow_id=uuid4(), deployment_id=uuid4() if deployed else None)
    context = FlowRunContext.model_construct(flow_run=flow_run)
    monkeypatch.setattr(FlowRunContext, "get", lambda: context)
    recipe = "infra/recipes/embedded.yaml"
    with in_the_checkout():
        assert Path.cwd() == (CHECKOUT if deployed else tmp_path)
        if deployed:
            assert find_recipe(recipe).name == "embedded"
        else:
            with pytest.raises(ConfigError, match=f"got {recipe}, that is {tmp_path / recipe}"):
                find_recipe(recipe)
    assert Path.cwd() == tmp_path
