from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from support.processes import ROOT
from support.servers import free_port
from tasks.run.prefect_runs import (
    _require_own_checkout,
    deploy,
    prefect_must_answer,
)
from umim_core.errors import ClusterError, ConfigError, CorpusError


def test_a_stage_that_fails_while_the_server_is_away_shows_its_own_error() -> None:
    own = CorpusError("a corpus must have text", "empty.txt")
    with (
        pytest.raises(CorpusError, match="a corpus must have text") as found,
        prefect_must_answer(),
    ):
        try:
            raise own
        except CorpusError:
            httpx.get("http://127.0.0.1:9", trust_env=False)  # Prefect reports the failed state
    assert found.value is own
    assert "Prefect's server is away too" in found.value.__notes__[0]


def test_the_password_of_a_server_that_is_away_is_hidden() -> None:
    address = "http://me:s3cret@127.0.0.1:9/api"
    with (
        temporary_settings({PREFECT_API_URL: address}),
        pytest.raises(ClusterError, match=r"//\*\*\*@127") as found,
        prefect_must_answer(),
    ):
        raise httpx.ConnectError(f"no answer from {address}")
    assert "s3cret" not in str(found.value)


@pytest.mark.full
def test_a_server_that_takes_no_deployments_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{free_port()}/api")
    with pytest.raises(ClusterError, match="Prefect's server must take deployments"):
        deploy()


def test_deployments_without_a_server_are_refused_at_once() -> None:
    refused = pytest.raises(ConfigError, match="of which PREFECT_API_URL is the address")
    with temporary_settings({PREFECT_API_URL: None}), refused:
        deploy()


@pytest.mark.parametrize(("place", "refused"), [("docs", True), ("/nowhere", False), (ROOT, False)])
def test_a_run_whose_worker_stands_in_another_checkout_is_refused(
    place: Path, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    (other / "flows").mkdir(parents=True)
    (other / "flows" / "pipeline_flows.py").touch()
    worker = SimpleNamespace(cwd=lambda: str(other / place))
    monkeypatch.setattr("psutil.Process.parent", lambda _: worker)
    message = f"must run the flows of the checkout .*; got {ROOT}, by a worker in {other}"
    with pytest.raises(ConfigError, match=message) if refused else nullcontext():
        _require_own_checkout()
