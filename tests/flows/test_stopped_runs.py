"""A whole run that is stopped or killed, then the same command: no process left, equal digests."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from support.flow_runs import digests, said, start
from support.shared_services import PrefectServer
from support.small_recipe import files_corpus, write_recipe
from umim_core.store.artifacts import MANIFEST

pytestmark = pytest.mark.full
SECONDS = 5.0
STEP = "distill/*.partial/whole/state/step-*"
TEXT = "Return a new array. Return a new view of the array. Return the sum of the array. " * 200


@pytest.fixture(scope="module", autouse=True)
def api(prefect_server: PrefectServer) -> Iterator[None]:
    """Runs are flow runs of a server, but for tests that take its name away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_API_URL", prefect_server.url)
        yield


@contextmanager
def running(base: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = start(base / "root", "--flow", "distill", base.parent / "stopped.yaml")
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def finish(base: Path) -> dict[str, str]:
    with running(base) as process:
        assert process.wait(900) == 0, said(base / "root")
    return digests(base / "root")


def stop(base: Path, number: signal.Signals, moment: str) -> int:
    """Send a signal as soon as a file is there; assert that nothing stays; return the status."""
    with running(base) as process:
        while not any((base / "root").glob(f"{moment}/{MANIFEST}")):
            assert process.poll() is None, said(base / "root")
            time.sleep(0.02)
        left, began = psutil.Process(process.pid).children(recursive=True), time.monotonic()
        assert left or "distill" not in moment  # before that Ray may not have started
        if number == signal.SIGINT:  # a terminal sends it to all of them
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        status = process.wait(60)
        assert psutil.wait_procs(left, timeout=SECONDS - (time.monotonic() - began))[1] == []
    return status


def ends(base: Path) -> tuple[str, str]:
    """Return how the pipeline ended for MLflow, and its newest flow run for Prefect, if any."""
    with sqlite3.connect(base / "mlflow.db") as connection:
        runs = connection.execute("select status from runs where name like 'umim-distill%'")
        tracked = str(runs.fetchone()[0])
    if "PREFECT_API_URL" not in os.environ:
        return tracked, ""
    newest = {"sort": "EXPECTED_START_TIME_DESC", "limit": 1}
    found = httpx.post(f"{os.environ['PREFECT_API_URL']}/flow_runs/filter", json=newest, timeout=60)
    return tracked, found.json()[0]["state_type"]


@pytest.fixture(scope="module")
def undisturbed(api: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    base = tmp_path_factory.mktemp("stopped") / "undisturbed"
    base.mkdir()
    training = {"max_steps": 30, "batch_size": 4, "checkpoint_every": 2, "validation_rows": 2}
    write_recipe(
        base.parent / "stopped.yaml",
        corpus=files_corpus(base, TEXT),
        segment_length=64,
        cells=[{"backbone": "umim-docs-llama", "tau": 5}],
        distill=training,
        task=None,
        cluster={"workers": 2, "cpus": 2, "object_store_gib": 0.1},
    )
    found = finish(base)
    assert ends(base) == ("FINISHED", "COMPLETED")
    return base, found


@pytest.mark.parametrize(
    ("number", "moment", "again", "served"),
    [
        (signal.SIGTERM, f"{STEP}04", "root/distill", True),
        (signal.SIGINT, f"{STEP}04", "root/distill", False),
        (signal.SIGKILL, f"{STEP}04", "root/distill", False),
        (signal.SIGTERM, "corpus/*", "root", False),
        (signal.SIGKILL, "tokenize/*", "root", True),
    ],
)
def test_a_run_leaves_no_process_and_the_same_command_ends_with_the_same_digests(
    undisturbed: tuple[Path, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    moment: str,
    again: str,
    served: bool,
) -> None:
    if not served:
        monkeypatch.delenv("PREFECT_API_URL")
    whole, whole_digests = undisturbed
    base = whole.with_name(f"{number.name}-{moment[:4]}")
    shutil.copytree(whole, base)
    shutil.rmtree(base / again)
    (base / "mlflow.db").unlink()  # a finished run does not reopen
    status = stop(base, number, moment)
    assert digests(base / "root").items() <= whole_digests.items()
    if number == signal.SIGKILL:
        assert status == -signal.SIGKILL
    else:
        assert status == 128 + number
        assert said(base / "root").splitlines()[-1] == "stopped; the same command continues"
        assert ends(base) == ("KILLED", "CANCELLED" if served else "")
    assert finish(base) == whole_digests
    assert ends(base) == ("FINISHED", "COMPLETED" if served else "")
    assert ("distill: resuming at step " in said(base / "root")) == (again == "root/distill")
