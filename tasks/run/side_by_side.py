"""Independent parts of a flow, several at a time, in threads that share the cores.

What a stage computes releases Python's lock: torch's operations, processes, Ray's workers. Each
part gets the context of the flow, so its stages are tasks of the same Prefect run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from typing import TypeVar

import torch

from tasks.cluster.stopping import parked_by_a_stop

T = TypeVar("T")
Part = Callable[[], object]
"""A part that leaves its results where they belong."""


def side_by_side(parts: Sequence[Callable[[], T]], most: int) -> list[T]:
    """Call independent functions, at most so many at a time."""
    if most == 1 or len(parts) < 2:
        return [part() for part in parts]
    threads, failed = torch.get_num_threads(), threading.Event()

    def run(part: Callable[[], T]) -> T:
        if failed.is_set():
            raise CancelledError
        with ExitStack() as unless_returned, parked_by_a_stop():
            unless_returned.callback(failed.set)
            result = part()
            unless_returned.pop_all()
        return result

    most = min(most, len(parts))
    share = max(1, threads // most)
    with ThreadPoolExecutor(most, "part", torch.set_num_threads, (share,)) as pool:
        futures = [pool.submit(copy_context().run, run, part) for part in parts]
    torch.set_num_threads(threads)  # the threads of the pool have changed it for this one, too
    outcomes = [future.exception() for future in futures]
    errors = [error for error in outcomes if not isinstance(error, CancelledError | None)]
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"Another part failed, too: {type(other).__name__}: {other}")
        raise errors[0]
    return [future.result() for future in futures]
