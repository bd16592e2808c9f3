from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayTaskError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from tasks.cluster.worker_errors import cluster_error
from umim_core.errors import ClusterError

RULE, AGAIN = "workers must stay alive", "Run the same command again."
LONG = "; ".join(f"field {number} must be a number" for number in range(40))


def task_error(cause: Exception) -> RayTaskError:
    """As `ray.get` raises it: a worker's error, with a traceback as its text."""
    text = f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n{cause!r}'
    raised: RayTaskError = RayTaskError("f", text, cause).as_instanceof_cause()
    return raised


@pytest.mark.parametrize(
    "error",
    [
        task_error(ValueError(LONG)),
        WorkerGroupError("...", {0: ValueError(LONG), 1: ValueError("later")}),
        ControllerError(task_error(ValueError(LONG))),
    ],
)
def test_the_first_cause_is_shown_whole_and_is_to_be_corrected(error: Any) -> None:
    found = cluster_error(RULE, error, AGAIN)
    assert isinstance(found, ClusterError)
    assert str(found.value) == f"ValueError: {LONG}"
    assert str(found).startswith(f"{RULE}; got ValueError: field 0 must be a number")
    assert found.__notes__ == [f"ValueError: {LONG}"]
    assert found.remedy.startswith("Correct what the error names")


@pytest.mark.parametrize(
    "cause", [NodeDiedError("node 10.0.0.2 is gone\nits pid was 7"), OutOfMemoryError("95 % used")]
)
def test_a_lost_worker_is_no_fault_of_the_recipe(cause: Exception) -> None:
    wrapped = WorkerGroupError("...", {0: WorkerHealthCheckFailedError("no answer", cause)})
    for error in (cause, wrapped):
        found = cluster_error(RULE, error, AGAIN)
        assert found.remedy == AGAIN
        assert str(cause) in "\n".join([str(found), *getattr(found, "__notes__", [])])
