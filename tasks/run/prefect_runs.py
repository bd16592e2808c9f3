"""Prefect: its deployments of the flows, and flow runs that are stopped or lose their server."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final
from uuid import UUID

import httpx
import psutil
from prefect import get_client
from prefect.automations import Automation
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.events import ChangeFlowRunState, emit_event
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogHandler
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
    get_current_settings,
)
from prefect.states import Cancelled, StateType

from tasks.cluster.ray_cluster import CHECKOUT
from tasks.cluster.stopping import is_stoppable, on_stop, stoppable
from tasks.run.services import POOL
from umim_core.addresses import scrubbed
from umim_core.errors import ClusterError, ConfigError, UmimError
from umim_core.store.child_processes import die_with_parent

logger = logging.getLogger("umim.prefect")
_CONNECTION_LIBRARIES: Final = ("anyio", "asyncio", "httpcore", "httpx", "prefect")
_TOLD_SECONDS: Final = 2.0
# Two and a half heartbeats, whose interval prefect.yaml sets: the server looks every five seconds
# and takes some to act, and the run shall be Crashed within three.
SILENCE: Final = timedelta(seconds=75)
_CRASHED: Final = "umim: runs without a heartbeat have crashed"
_EVENT: Final = "prefect.flow-run."
_ENDS: Final = ("Completed", "Failed", "Cancelled", "Crashed")


def require_own_checkout() -> None:
    """Refuse a deployed flow run whose worker was started in another checkout."""
    try:
        worker = psutil.Process().parent()
        place = None if worker is None else Path(worker.cwd())
    except psutil.Error:  # of another user, or gone
        return
    if place is None:
        return
    for folder in (place, *place.parents):
        if (folder / "prefect.yaml").is_file() and (folder / "flows" / "__init__.py").is_file():
            if folder.resolve() != CHECKOUT:
                raise ConfigError(
                    "a Prefect worker must run the flows of the checkout that it was started in",
                    f"{CHECKOUT}, by a worker in {folder}",
                    "Start the worker in that checkout, or with the environment of its own.",
                )
            return


def start_temporary_server() -> None:
    """Start Prefect's temporary server where no other is named, to end with this process.

    Prefect itself would leave it running after a kill, and let the terminal's Ctrl-C end it before
    it hears of the end of the run, with a traceback per connection.
    """
    if PREFECT_API_URL.value() or not PREFECT_SERVER_ALLOW_EPHEMERAL_MODE.value():
        return
    from prefect.server.api.server import SubprocessASGIServer

    class Server(SubprocessASGIServer):
        def _run_uvicorn_command(self) -> subprocess.Popen[bytes]:
            app = "prefect.server.api.server:create_app"
            command = [sys.executable, "-m", "uvicorn", "--factory", app, "--host", "127.0.0.1"]
            command += ["--port", str(self.port), "--log-level", "error", "--lifespan", "on"]
            own = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"}
            own |= get_current_settings().to_environment_variables(exclude_unset=True)
            return subprocess.Popen(  # noqa: S603  commands are our own
                command,
                env={**os.environ, **own, "PREFECT__SERVER_FINAL": "1"},
                preexec_fn=die_with_parent,
                start_new_session=True,
            )

    Server().start()


@contextmanager
def prefect_may_be_away() -> Iterator[None]:
    """Let the block, which only shows something on Prefect's pages, end with its server."""
    try:
        yield
    except httpx.HTTPError as error:
        logger.warning("Prefect is away, its pages lack what was found: %s", _shown(str(error)))


@contextmanager
def prefect_must_answer() -> Iterator[None]:
    """Say in one line that a flow run could not be begun or ended because its server is away."""
    try:
        yield
        return
    except httpx.HTTPError as error:
        failed = _failed_before(error)
        after = f", after {type(failed).__name__}: {failed}" if failed else ""
        away = ClusterError(
            "Prefect's server must answer when a flow run begins and ends",
            _shown(f"{PREFECT_API_URL.value() or 'the temporary server'}: {error}{after}"),
            "Start it, or unset PREFECT_API_URL; the same command again finds every finished stage "
            "and ends at once.",
        )
        if not isinstance(failed, UmimError):
            raise away from error
    failed.add_note(f"Prefect's server is away too: {away.value}")
    raise failed


def _shown(text: str) -> str:
    return scrubbed(text, PREFECT_API_URL.value() or "")


def _failed_before(error: BaseException) -> BaseException | None:
    """Return what was being handled when a request failed: our own error, else the newest other.

    The errors of the connection itself are left out.
    """
    chain = [error]
    for link in chain:  # it grows meanwhile
        chain += [at for at in (link.__cause__, link.__context__) if at and at not in chain]
    others = [link for link in chain if not _of_a_connection(link)]
    ours = [link for link in others if isinstance(link, UmimError)]
    return next(iter(ours + others), None)


def _of_a_connection(error: BaseException) -> bool:
    unnamed = type(error) is OSError and error.errno is None  # "All connection attempts failed"
    kinds = (ConnectionError, TimeoutError, socket.gaierror, BaseExceptionGroup)
    library = type(error).__module__.partition(".")[0]
    return unnamed or isinstance(error, kinds) or library in _CONNECTION_LIBRARIES


def _flow_run() -> FlowRun | None:
    context = FlowRunContext.get()
    return None if context is None else context.flow_run


@contextmanager
def in_the_checkout() -> Iterator[None]:
    """Make relative paths of a deployed flow run those of the checkout.

    A worker starts it in an empty folder of its own. Any other run stays where it was started.
    """
    run = _flow_run()
    deployed = run is not None and run.deployment_id is not None
    if deployed:
        require_own_checkout()
    with chdir(CHECKOUT) if deployed else nullcontext():
        yield


@contextmanager
def stopping_of_this_run() -> Iterator[None]:
    """Make the flow run under way stoppable, where the process is its own.

    That is one of the command line, or one that a Prefect worker started for a deployment. In any
    other process (a notebook, a test) Ctrl-C stays the ordinary exception.
    """
    run = _flow_run()
    with ExitStack() as stack:
        if is_stoppable() or (run is not None and run.deployment_id is not None):
            stack.enter_context(stoppable())
            if run is not None:
                stack.enter_context(on_stop(partial(_cancelled, run.id)))
        yield


def _cancelled(run: UUID) -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run, Cancelled(message="Stopped by a signal."), force=True)


@contextmanager
def logs_on_the_run_page() -> Iterator[None]:
    """Send the lines of our loggers to the Prefect flow run under way, if there is one."""
    run = _flow_run()
    if run is None:
        yield
        return

    def of_this_run(record: logging.LogRecord) -> bool:
        record.flow_run_id = run.id  # also of threads, which know no run
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
        _tell_why(run.id, error)
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
        _shown(f"{what}: {why}"),
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
