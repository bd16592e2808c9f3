"""A store without a server that several runs make and use at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from support.tracked_runs import held
from tasks.tracking.mlflow_store import Store
from tasks.tracking.spool import Spool

CHECKOUT = Path(__file__).resolve().parents[3]
RECORD = """
import sys
from pathlib import Path
from support.tracked_runs import record_pipeline
from tasks.tracking.tracker import Tracker
root = Path(sys.argv[1])
record_pipeline(Tracker(sys.argv[2], root), root.name, root / "files")
"""


def test_a_store_that_another_run_is_making_is_waited_for(tmp_path: Path, store: str) -> None:
    connecting, order = threading.Event(), []

    def make() -> None:
        with Store(store, tmp_path, "umim").session(60, 1, 1):
            connecting.set()
            time.sleep(1.5)  # longer than a store that is there may keep others waiting
            order.append("made")

    thread = threading.Thread(target=make)
    thread.start()
    assert connecting.wait(60)
    with Store(store, tmp_path, "umim").session(60, 1, 1):
        order.append("used")
    thread.join()
    assert order == ["made", "used"]


@pytest.mark.full
def test_two_runs_that_start_at_once_on_a_new_store_both_record(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    roots = [tmp_path / "p0", tmp_path / "p1"]  # a spool each, which no other run writes
    paths = os.pathsep.join(map(str, (CHECKOUT, CHECKOUT / "tests")))
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RECORD, str(root), uri], env=os.environ | {"PYTHONPATH": paths}
        )
        for root in roots
    ]
    assert [process.wait(timeout=280) for process in started] == [0, 0]
    assert [Spool(root).waiting() for root in roots] == [[], []]
    assert {"pipeline p0", "pipeline p1"} <= set(held(uri))
