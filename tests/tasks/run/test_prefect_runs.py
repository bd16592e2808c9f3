from __future__ import annotations

import logging
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.cluster.ray_cluster import CHECKOUT
from tasks.run.prefect_runs import in_the_checkout, prefect_may_be_away, prefect_must_answer
from tasks.run.recipes import find_recipe
from umim_core.errors import ClusterError, ConfigError, CorpusError


def ask_a_closed_port() -> None:
    httpx.get("http://127.0.0.1:9", trust_env=False)


def fail_while_the_server_is_away(error: Exception) -> None:
    try:
        raise error
    except Exception:
        ask_a_closed_port()  # Prefect reports the failed state


def test_a_stage_that_fails_while_the_server_is_away_shows_its_own_error() -> None:
    own = CorpusError("a corpus must have text", "empty.txt")
    with (
        pytest.raises(CorpusError, match="a corpus must have text") as found,
        prefect_must_answer(),
    ):
        fail_while_the_server_is_away(own)
    assert found.value is own
    assert "Prefect's server is away too" in found.value.__notes__[0]


def test_the_password_of_a_server_that_is_away_is_hidden(caplog: pytest.LogCaptureFixture) -> None:
    address = "http://me:s3cret@127.0.0.1:9/api"
    with (
        temporary_settings({PREFECT_API_URL: address}),
        pytest.raises(ClusterError, match=r"//\*\*\*@127") as found,
        prefect_must_answer(),
    ):
        raise httpx.ConnectError(f"no answer from {address}")
    assert "s3cret" not in str(found.value)
    with caplog.at_level(logging.WARNING, "umim.prefect"), prefect_may_be_away():
        raise httpx.ConnectError(f"no answer from {address}")
    assert "s3cret" not in caplog.text


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
