"""Logs of a pipeline, and the reason of a failure, on the page of its Prefect run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from uuid import UUID

from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogHandler

from tasks.tracking.tracking_values import redact
from umim_core.errors import UmimError

_TOLD_SECONDS: Final = 2.0


@contextmanager
def logs_on_the_run_page() -> Iterator[None]:
    """Send the lines of our loggers to the Prefect flow run under way, if there is one."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        yield
        return
    run_id = context.flow_run.id

    def of_this_run(record: logging.LogRecord) -> bool:
        record.flow_run_id = run_id  # also of threads, which know no run
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
        _tell_why(context.flow_run.id, error)
        raise
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)


def _tell_why(run_id: UUID, error: UmimError) -> None:
    """Emit an event that names the error, and wait until the server has it.

    ``prefect deployment run --watch`` shows names of events and, unless the server streams them,
    no logs; it ends with the event of the failed state, which comes next.
    """
    name = redact(f"{type(error).__name__}: {error}")
    place = {"prefect.resource.id": f"prefect.flow-run.{run_id}", "prefect.resource.name": name}
    if emit_event("umim.failed", place) is not None:
        waiting = threading.Thread(target=EventsWorker.instance().wait_until_empty, daemon=True)
        waiting.start()
        waiting.join(_TOLD_SECONDS)  # a server that died is not waited for
