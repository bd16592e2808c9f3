"""How a stop ends a Prefect flow run; the temporary server hears of it before it goes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from uuid import UUID

from prefect import get_client
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE
from prefect.states import Cancelled

from tasks.stopping import in_use, stoppable, told


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
def stopping_of_this_run() -> Iterator[None]:
    """Make the flow run under way stoppable, where the process is its own.

    That is one of the command line, or one that a Prefect worker started for a deployment. In any
    other process (a notebook, a test) Ctrl-C stays the ordinary exception.
    """
    context = FlowRunContext.get()
    run = None if context is None else context.flow_run
    with ExitStack() as stack:
        if in_use() or (run is not None and run.deployment_id is not None):
            stack.enter_context(stoppable())
            if run is not None:
                stack.enter_context(told(partial(_cancelled, run.id)))
        yield


def _cancelled(run: UUID) -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run, Cancelled(message="Stopped by a signal."), force=True)
