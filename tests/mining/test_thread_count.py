"""Number of counting threads where none is asked for."""

from __future__ import annotations

import os
import sys

import pytest

from umim_core.mining.counting import thread_count


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS does not tell")
def test_there_is_a_thread_per_core_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 8})
    assert (thread_count(None), thread_count(7)) == (3, 7)
