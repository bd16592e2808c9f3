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

# Two and a half heartbeats, whose interval prefect.yaml sets: the server looks every five seconds
# and takes some to act, and the run shall be Crashed within three.
SILENCE: Final = timedelta(seconds=75)
_CRASHED: Final = "umim: runs without a heartbeat have crashed"
_EVENT: Final = "prefect.flow-run."
_ENDS: Final = ("Completed", "Failed", "Cancelled", "Crashed")


def deploy() -> None:
    """Register everything with the server of ``PREFECT_API_URL``; again, it is brought up to date.

    A work pool that is there stays as it is: its concurrency limit is the operator's.
    """
    if _prefect(["work-pool", "inspect", POOL]).returncode:
        _require(["work-pool", "create", POOL, "--type", "process"])
    _require(["deploy", "--all"])
    try:
        _end_killed_runs()
    except httpx.HTTPError as error:
        raise _refused("its automations", str(error)) from error


def _prefect(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603  commands are our own
        [sys.executable, "-m", "prefect", "--no-prompt", *command],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
    )


def _require(command: list[str]) -> None:
    done = _prefect(command)
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
