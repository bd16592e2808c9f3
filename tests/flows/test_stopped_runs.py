"""A whole run stopped while two Ray workers distil: gone in seconds, and resumed to the digest."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 5.0
STEP, STEPS = 4, 30
TEXT = "Return a new array. Return a new view of the array. Return the sum of the array. " * 200
pytestmark = pytest.mark.full


@dataclass(frozen=True)
class Place:
    """Where a run keeps everything, and how it ends."""

    base: Path

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start the command; its output goes to ``log``."""
        environment = os.environ | {
            "UMIM_ROOT": str(self.base / "root"),
            "MLFLOW_TRACKING_URI": f"sqlite:///{self.base / 'mlflow.db'}",
            "PREFECT_HOME": str(self.base / "prefect"),
        }
        command = [sys.executable, "-m", "flows", "run", "--flow", "distill"]
        with (self.base / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, str(self.base.parent / "stopped.yaml")],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group, as a terminal makes one
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def log(self) -> str:
        return (self.base / "log").read_text(encoding="utf-8")

    def finish(self) -> str:
        """Run to the end; return the digest of the distillation."""
        with self.running() as process:
            assert process.wait(900) == 0, self.log()
        (manifest,) = self.base.glob("root/distill/*/manifest.json")
        digest: str = yaml.safe_load(manifest.read_text(encoding="utf-8"))["digest"]
        return digest

    def wait_for_step(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until a state of some steps is whole."""
        while process.poll() is None:
            done = self.base.glob("root/distill/*.partial/whole/state/step-*/manifest.json")
            if any(int(path.parent.name[5:]) >= STEP for path in done):
                return
            time.sleep(0.05)
        raise AssertionError(self.log())

    def stop(self, number: signal.Signals) -> int:
        """Train for some steps, stop, assert that nothing stays; return the status."""
        with self.running() as process:
            self.wait_for_step(process)
            started = psutil.Process(process.pid).children(recursive=True)
            assert sum("RayTrainWorker" in child.name() for child in started) == 2
            began = time.monotonic()
            if number == signal.SIGINT:  # a terminal sends it to all of them
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
            status = process.wait(60)
            assert psutil.wait_procs(started, timeout=SECONDS - (time.monotonic() - began))[1] == []
            folders = f"umim-ray-{process.pid}-*"
            while any(any(Path(base).glob(folders)) for base in (tempfile.gettempdir(), "/tmp")):
                assert time.monotonic() - began < SECONDS
                time.sleep(0.02)
        return status

    def newest(self, store: str, query: str) -> str:
        """Return one value of a store's newest row."""
        with sqlite3.connect(self.base / store) as connection:
            (value,) = connection.execute(query).fetchone()
        return str(value)

    def pipeline(self) -> str:
        """Status of the pipeline's run in MLflow."""
        return self.newest("mlflow.db", "select status from runs where name like 'umim-distill%'")

    def flow_run(self) -> str:
        """State of the newest flow run in Prefect."""
        query = "select state_type from flow_run order by created desc"
        return self.newest("prefect/prefect.db", query)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Place, str]:
    base = tmp_path_factory.mktemp("stopped")
    source = {}
    for split in ("train", "valid", "test"):
        (base / f"{split}.txt").write_text(TEXT, encoding="utf-8")
        source[split] = {"kind": "text", "paths": [str(base / f"{split}.txt")]}
    training = {"max_steps": STEPS, "batch_size": 4, "checkpoint_every": 2, "validation_rows": 2}
    recipe = {
        "name": "stopped",
        "corpus": {"kind": "files", **source},
        "segment_length": 64,
        "cells": [{"backbone": "umim-docs-llama", "tau": 5}],
        "distill": training,
        "task": None,
        "cluster": {"workers": 2, "cpus": 2, "object_store_gib": 0.1},
    }
    (base / "stopped.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    place = Place(base / "undisturbed")
    place.base.mkdir()
    digest = place.finish()
    assert (place.pipeline(), place.flow_run()) == ("FINISHED", "COMPLETED")
    return place, digest


@pytest.fixture
def place(undisturbed: tuple[Place, str], request: pytest.FixtureRequest) -> Place:
    """A place where everything is done but the distillation."""
    done = undisturbed[0].base
    copy = done.with_name(f"copy-{abs(hash(request.node.name))}")
    shutil.copytree(done, copy)
    shutil.rmtree(copy / "root" / "distill")
    (copy / "mlflow.db").unlink()  # a finished run does not reopen
    return Place(copy)


def test_term_ends_the_run_and_the_same_command_ends_with_the_same_digest(
    place: Place, undisturbed: tuple[Place, str]
) -> None:
    assert place.stop(signal.SIGTERM) == 143
    said = place.log().strip().splitlines()[-1]
    assert said.startswith("stopped; the same command continues at step ")
    assert (place.pipeline(), place.flow_run()) == ("KILLED", "CANCELLED")
    assert place.finish() == undisturbed[1]
    assert f"distill: resuming at step {said.split()[-1]}\n" in place.log()
    assert (place.pipeline(), place.flow_run()) == ("FINISHED", "COMPLETED")


def test_a_run_that_is_killed_leaves_no_process_and_no_folder(place: Place) -> None:
    assert place.stop(signal.SIGKILL) == -signal.SIGKILL
