"""Prefect: its deployments of the flows, and flow runs that are stopped or lose their server."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, cast
from uuid import UUID

import httpx
import psutil
import yaml
from prefect import get_client
from prefect.automations import Automation
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled

from tasks.cluster.ray_cluster import CHECKOUT
from tasks.cluster.stopping import is_stoppable, on_stop, stoppable
from tasks.run.services import POOL
from umim_core.addresses import scrubbed
from umim_core.errors import ClusterError, ConfigError, UmimError, require

_TOLD_SECONDS: Final = 2.0


@contextmanager
def prefect_must_answer() -> Iterator[None]:
    """Say in one line that a flow run could not be begun or ended because its server is away.

    Of a run that had failed before that, its own error is the one to show.
    """
    try:
        yield
    except (httpx.HTTPError, RuntimeError) as error:  # Prefect raises the second from the first
        if not any(isinstance(one, httpx.HTTPError) for one in (error, error.__cause__)):
            raise
        rule = "Prefect's server must answer when a flow run begins and ends"
        remedy = "Start it, or unset PREFECT_API_URL; the same command finds its finished stages."
        away = ClusterError(rule, _shown(f"{PREFECT_API_URL.value()}: {error}"), remedy)
        before: BaseException | None = error
        while before is not None and not isinstance(before, UmimError):
            before = before.__cause__ or before.__context__
        if before is None:
            raise away from error
        before.add_note(f"Prefect's server is away too: {away.value}")
        raise before from None


def _shown(text: str) -> str:
    return scrubbed(text, PREFECT_API_URL.value() or "")


@contextmanager
def flow_run_context() -> Iterator[None]:
    """Give the flow run under way its folder, its end by a signal, and its page our log lines.

    A worker starts a deployed run in an empty folder of its own; its relative paths are those of
    the checkout. Stoppable is a run whose process is its own: a deployed one, or one of the command
    line. In any other process (a notebook, a test) Ctrl-C stays the ordinary exception.
    """
    context = FlowRunContext.get()
    run = None if context is None else context.flow_run
    with ExitStack() as stack:
        deployed = run is not None and run.deployment_id is not None
        if deployed:
            _require_own_checkout()
            stack.enter_context(chdir(CHECKOUT))
        if deployed or is_stoppable():
            stack.enter_context(stoppable())
        if run is not None:
            stack.enter_context(on_stop(partial(_cancelled, run.id)))
            stack.enter_context(_logs_on_the_page(run.id))
        yield


def _require_own_checkout() -> None:
    """Refuse a deployed flow run whose worker was started in another checkout."""
    worker = psutil.Process().parent()
    try:
        place = CHECKOUT if worker is None else Path(worker.cwd())
    except psutil.Error:  # of another user, or gone
        return
    places = (place, *place.parents)
    other = next((at for at in places if (at / "flows/pipeline_flows.py").is_file()), CHECKOUT)
    rule = "a Prefect worker must run the flows of the checkout that it was started in"
    found = f"{CHECKOUT}, by a worker in {other}"
    remedy = "Start the worker in that checkout, or with the environment of its own."
    require(other.resolve() == CHECKOUT, ConfigError, rule, found, remedy)


def _cancelled(run: UUID) -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run, Cancelled(message="Stopped by a signal."), force=True)


@contextmanager
def _logs_on_the_page(run: UUID) -> Iterator[None]:
    def of_this_run(record: logging.LogRecord) -> bool:
        record.flow_run_id = run  # also of threads, which know no run
        return True

    handler = APILogHandler(level=logging.INFO)
    handler.addFilter(of_this_run)
    ours = logging.getLogger("umim")
    level = ours.level
    ours.addHandler(handler)
    if not ours.isEnabledFor(logging.INFO):
        ours.setLevel(logging.INFO)
    try:
        yield
    except UmimError as error:
        _tell_why(run, error)
        raise
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)


def _tell_why(run_id: UUID, error: UmimError) -> None:
    """Emit an event that names the error, and wait until the server has it.

    ``prefect deployment run --watch`` shows names of events and, unless the server streams them,
    no logs; it ends with the event of the failed state, which comes next.
    """
    name = _shown(f"{type(error).__name__}: {error}")
    place = {"prefect.resource.id": f"prefect.flow-run.{run_id}", "prefect.resource.name": name}
    if emit_event("umim.failed", place) is not None:
        waiting = threading.Thread(target=EventsWorker.instance().wait_until_empty, daemon=True)
        waiting.start()
        waiting.join(_TOLD_SECONDS)  # a server that died is not waited for


def deploy() -> None:
    """Register everything with the server of ``PREFECT_API_URL``; again, it is brought up to date.

    A work pool that is there stays as it is: its concurrency limit is the operator's.
    """
    rule = "deployments need a running server, of which PREFECT_API_URL is the address"
    remedy = "`python -m flows up` starts one, deploys to it and prints the variable."
    require(PREFECT_API_URL.value() is not None, ConfigError, rule, "no address", remedy)
    _prefect("work-pool", "create", POOL, "--type", "process")  # refused where there is one
    done = _prefect("deploy", "--all")
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise _refused("deploy --all", " ".join(last))
    text = (CHECKOUT / "infra" / "crashed-runs.yaml").read_text(encoding="utf-8")
    automation = Automation.model_validate(yaml.safe_load(text))
    try:
        found = cast(Automation, Automation.read(name=automation.name))  # typed as a coroutine
        automation.id = found.id
    except ValueError:  # there is none
        automation.create()
    except httpx.HTTPError as error:
        raise _refused("its automations", str(error)) from error
    else:
        automation.update()


def _prefect(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603  commands are our own
        [sys.executable, "-m", "prefect", "--no-prompt", *command],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
    )


def _refused(what: str, why: str) -> ClusterError:
    return ClusterError(
        "Prefect's server must take deployments",
        _shown(f"{what}: {why}"),
        "Start it, and set PREFECT_API_URL.",
    )
