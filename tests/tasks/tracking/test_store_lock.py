"""A store without a server that several runs make and use at the same time."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from tasks.tracking.mlflow_store import Store


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
