"""Registration with Prefect: the work pool, a deployment of every flow, an end for killed runs."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from typing import Final

import httpx
from prefect.automations import Automation
from prefect.events import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.states import StateType

from tasks.cluster.ray_cluster import CHECKOUT
from tasks.run.services import POOL
from umim_core.errors import ClusterError

SILENCE: Final = timedelta(seconds=90)  # three heartbeats, whose interval prefect.yaml sets
_CRASHED: Final = "umim: runs without a heartbeat have crashed"
_EVENT: Final = "prefect.flow-run."
_ENDS: Final = ("Completed", "Failed", "Cancelled", "Crashed")


def deploy() -> None:
    """Register everything with the server of ``PREFECT_API_URL``; again, it is brought up to date.

    Raises:
        ClusterError: If the server does not answer or refuses.
    """
    for command in (
        ["work-pool", "create", POOL, "--type", "process", "--overwrite"],
        ["deploy", "--all"],
    ):
        _prefect(command)
    try:
        _end_killed_runs()
    except httpx.HTTPError as error:
        raise _refused("its automations", str(error)) from error


def _prefect(command: list[str]) -> None:
    done = subprocess.run(  # noqa: S603  commands are our own
        [sys.executable, "-m", "prefect", "--no-prompt", *command],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise _refused(" ".join(command), " ".join(last))


def _refused(what: str, why: str) -> ClusterError:
    return ClusterError(
        "Prefect's server must take deployments",
        f"{what}: {why}",
        "Start it, and set PREFECT_API_URL to its address.",
    )


def _end_killed_runs() -> None:
    """Have the server call a run crashed whose process and worker were killed.

    A worker that lives sees the end of its processes itself.
    """
    heartbeat = f"{_EVENT}heartbeat"
    automation = Automation(
        name=_CRASHED,
        trigger=EventTrigger(
            after={heartbeat},
            expect={heartbeat, *(_EVENT + end for end in _ENDS)},
            match={"prefect.resource.id": f"{_EVENT}*"},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=SILENCE,
        ),
        actions=[
            ChangeFlowRunState(state=StateType.CRASHED, message="Its process sends no heartbeat.")
        ],
    )
    try:
        automation.id = Automation.read(name=_CRASHED).id
    except ValueError:  # there is none
        automation.create()
    else:
        automation.update()
