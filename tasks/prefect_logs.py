"""What a pipeline logs is shown on the page of its Prefect run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.context import FlowRunContext
from prefect.logging.handlers import APILogHandler


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
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)
