"""A test that hangs costs its limit, not the run: it fails by name and the next one runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
# A native call that no signal ends: the second lock of a mutex of one's own.
NATIVE = """
import ctypes

def test_that_hangs_in_native_code():
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    [lock(mutex) for _ in range(2)]
"""
PYTHON = """
import threading
import pytest

def test_that_hangs():
    threading.Event().wait()

@pytest.fixture
def slow():
    threading.Event().wait()

def test_whose_fixture_hangs(slow):
    pass

def test_that_swallows_its_interruption():
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        pass
"""
RAY = """
import pytest, ray, threading
from tasks.cluster.ray_cluster import ray_cluster

@pytest.fixture(scope="module", autouse=True)
def cluster():
    with ray_cluster(cpus=1, object_store_bytes=100 << 20):
        yield

@pytest.mark.timeout(120)
def test_that_starts_the_cluster():
    pass

def test_that_waits_for_a_worker_that_hangs():
    ray.get(ray.remote(lambda: threading.Event().wait(90)).remote())
"""
OTHERS = """
import pytest, threading

def test_behind_it():
    pass

@pytest.mark.full
def test_with_the_larger_limit():
    threading.Event().wait(1.2)

@pytest.mark.timeout(9)
def test_with_a_limit_of_its_own():
    threading.Event().wait(1.2)
"""


def run(folder: Path, hanging: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run tests of which some hang, with a limit of a second."""
    (folder / "test_a.py").write_text(hanging)
    (folder / "test_b.py").write_text(OTHERS)
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers = full\ntimeout = 1\ntimeout_full = 9\ntimeout_grace = 1\n"
    )
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "support.time_limits",
            "-q",
            "-rA",
            *options,
            str(folder),
        ],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def outcomes(output: str) -> dict[str, str]:
    """Outcome by test; a test that failed in a fixture is an ERROR."""
    return {name: word for word, name in re.findall(r"(\w+) .*::(\w+)", output)}


PASSED = dict.fromkeys(
    ["test_behind_it", "test_with_the_larger_limit", "test_with_a_limit_of_its_own"], "PASSED"
)


def test_a_hanging_test_fails_by_name_and_the_others_run(tmp_path: Path) -> None:
    done = run(tmp_path, PYTHON)
    failed = {
        "test_that_hangs": "FAILED",
        "test_whose_fixture_hangs": "ERROR",
        "test_that_swallows_its_interruption": "FAILED",
    }
    assert outcomes(done.stdout) == PASSED | failed, done.stdout + done.stderr
    assert "Failed: Timeout: the test took more than 1 s" in done.stdout


@pytest.mark.full
def test_a_wait_for_a_ray_worker_ends_at_the_limit(tmp_path: Path) -> None:
    done = run(tmp_path, RAY)
    ended = {"that_starts_the_cluster": "PASSED", "that_waits_for_a_worker_that_hangs": "FAILED"}
    found = outcomes(done.stdout)
    assert found == PASSED | {f"test_{name}": word for name, word in ended.items()}, done.stdout


def test_native_code_that_hangs_ends_the_process_with_the_tests_name(tmp_path: Path) -> None:
    done = run(tmp_path, NATIVE)
    assert done.returncode == 1
    assert "Timeout (0:00:02)!" in done.stderr
    assert "in test_that_hangs_in_native_code" in done.stderr


def test_a_worker_that_hangs_in_native_code_is_replaced(tmp_path: Path) -> None:
    done = run(tmp_path, NATIVE, "-n", "1")
    assert outcomes(done.stdout) == PASSED | {"test_that_hangs_in_native_code": "FAILED"}


def test_every_test_of_this_suite_has_a_limit(request: pytest.FixtureRequest) -> None:
    config = request.config
    limits = [float(config.getini(f"timeout{name}")) for name in ("", "_full", "_grace")]
    assert all(limits), "pyproject.toml sets them"
    assert config.pluginmanager.hasplugin("support.time_limits")
