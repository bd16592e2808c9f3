"""Registration with a real server of Prefect: one run at a time, and an end for killed ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.events import emit_event
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Pending, Running

from support.servers import free_port
from tasks.run import prefect_runs
from tasks.run.services import POOL, down, local_services, up
from umim_core.errors import ClusterError

pytestmark = pytest.mark.full


@pytest.fixture
def client(tmp_path: Path) -> Iterator[SyncPrefectClient]:
    """A client of a server that has its services, as the shared one has not."""
    server = local_services(tmp_path, free_port(), free_port())[0]
    try:
        up(tmp_path, [server])
        with (
            temporary_settings({PREFECT_API_URL: f"{server.url}/api"}),
            get_client(sync_client=True) as client,
        ):
            yield client
    finally:
        down(tmp_path, [server])


def test_a_run_without_a_heartbeat_is_crashed_and_the_one_that_waited_may_go_on(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", str(client.api_url))
    prefect_runs.deploy()
    client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=1))
    monkeypatch.setattr(prefect_runs, "SILENCE", timedelta(seconds=10))
    prefect_runs.deploy()  # again, it is brought up to date
    assert client.read_work_pool(POOL).concurrency_limit == 1  # the operator's stays
    client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=None))
    (automation,) = client.read_automations()
    assert automation.trigger.within == prefect_runs.SILENCE
    mine = next(of for of in client.read_deployments() if of.name == "mine")
    runs = [client.create_flow_run_from_deployment(mine.id).id for _ in range(2)]
    for state in (Pending(), Running()):
        client.set_flow_run_state(runs[0], state)
    client.set_flow_run_state(runs[1], Pending())
    assert client.read_flow_run(runs[1]).state.name == "AwaitingConcurrencySlot"
    place = {"prefect.resource.id": f"prefect.flow-run.{runs[0]}"}
    emit_event("prefect.flow-run.heartbeat", resource=place)  # and then its process is killed
    deadline = time.monotonic() + 240
    while client.read_flow_run(runs[0]).state.name == "Running":
        assert time.monotonic() < deadline
        time.sleep(1)
    assert client.read_flow_run(runs[0]).state.name == "Crashed"
    client.set_flow_run_state(runs[1], Pending())
    assert client.read_flow_run(runs[1]).state.name == "Pending"


def test_a_server_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{free_port()}/api")
    with pytest.raises(ClusterError, match="Prefect's server must take deployments"):
        prefect_runs.deploy()
