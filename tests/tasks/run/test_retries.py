from __future__ import annotations

import asyncio

import pytest
from prefect.states import exception_to_failed_state

from tasks.run.pipeline import _worth_a_retry
from umim_core.errors import (
    ArtifactError,
    ClusterError,
    ConfigError,
    CorpusError,
    NumericalError,
    TrackingError,
)


def tried_again(error: Exception) -> bool:
    return _worth_a_retry(None, None, asyncio.run(exception_to_failed_state(error)))


@pytest.mark.parametrize("kind", [ClusterError, TrackingError])
def test_what_may_pass_is_tried_again(kind: type[ClusterError | TrackingError]) -> None:
    assert tried_again(kind("rule", "value", "remedy"))


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("a lost node")])
def test_what_nobody_foresaw_is_tried_again(error: Exception) -> None:
    assert tried_again(error)


@pytest.mark.parametrize("kind", [ArtifactError, ConfigError, CorpusError, NumericalError])
def test_what_a_person_must_mend_is_not(kind: type[ArtifactError]) -> None:
    assert not tried_again(kind("rule", "value", "remedy"))
