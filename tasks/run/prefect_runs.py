"""Prefect flow runs that are stopped: the server records the end before it goes."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager, nullcontext
from functools import partial
from typing import Final
from uuid import UUID

import httpx
from prefect import get_client
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE
from prefect.states import Cancelled

from tasks.cluster.ray_cluster import CHECKOUT
from tasks.cluster.stopping import is_stoppable, on_stop, stoppable
from tasks.run.own_checkout import require_own_checkout
from tasks.tracking.tracking_values import redact
from umim_core.errors import ClusterError, UmimError

logger = logging.getLogger("umim.prefect")
_CONNECTION_LIBRARIES: Final = ("anyio", "asyncio", "httpcore", "httpx", "prefect")


def start_temporary_server() -> None:
    """Start Prefect's temporary server where no other is named, deaf to the terminal's Ctrl-C.

    Prefect would start it itself, but then Ctrl-C would end it before it hears of the end of the
    run, with a traceback per connection.
    """
    if PREFECT_API_URL.value() or not PREFECT_SERVER_ALLOW_EPHEMERAL_MODE.value():
        return
    from prefect.server.api.server import SubprocessASGIServer

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a new process inherits it
    try:
        SubprocessASGIServer().start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def prefect_may_be_away() -> Iterator[None]:
    """Let the block, which only shows something on Prefect's pages, end with its server."""
    try:
        yield
    except httpx.HTTPError as error:
        logger.warning("Prefect is away, its pages lack what was found: %s", redact(str(error)))


@contextmanager
def prefect_must_answer() -> Iterator[None]:
    """Say in one line that a flow run could not be begun or ended because its server is away.

    Raises:
        ClusterError: If so. The stages of a flow need no server, so they are finished.
        UmimError: What ended the flow, if it failed before the server was missed.
    """
    try:
        yield
        return
    except httpx.HTTPError as error:
        failed = _failed_before(error)
        after = f", after {type(failed).__name__}: {failed}" if failed else ""
        away = ClusterError(
            "Prefect's server must answer when a flow run begins and ends",
            redact(f"{PREFECT_API_URL.value() or 'the temporary server'}: {error}{after}"),
            "Start it, or unset PREFECT_API_URL; the same command again finds every finished stage "
            "and ends at once.",
        )
        if not isinstance(failed, UmimError):
            raise away from error
    failed.add_note(f"Prefect's server is away too: {away.value}")
    raise failed


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


@contextmanager
def in_the_checkout() -> Iterator[None]:
    """Make relative paths of a deployed flow run those of the checkout.

    A worker starts it in an empty folder of its own. Any other run stays where it was started.

    Raises:
        ConfigError: If the worker was started in another checkout.
    """
    context = FlowRunContext.get()
    run = None if context is None else context.flow_run
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
    context = FlowRunContext.get()
    run = None if context is None else context.flow_run
    with ExitStack() as stack:
        if is_stoppable() or (run is not None and run.deployment_id is not None):
            stack.enter_context(stoppable())
            if run is not None:
                stack.enter_context(on_stop(partial(_cancelled, run.id)))
        yield


def _cancelled(run: UUID) -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run, Cancelled(message="Stopped by a signal."), force=True)
