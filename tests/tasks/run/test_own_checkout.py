from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.processes import output_of
from tasks.cluster.ray_cluster import CHECKOUT

# A worker that stands in one folder after the other, and starts a run in each.
WORKER = """
import os, sys
from tasks.run.prefect_runs import require_own_checkout
from umim_core.errors import ConfigError
for folder in sys.argv[1:]:
    os.chdir(folder)
    if not os.fork():
        try:
            require_own_checkout()
            print("may run", flush=True)
        except ConfigError as error:
            print(str(error).replace(chr(10), " "), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another checkout."""
    folder = tmp_path_factory.mktemp("other")
    for name in ("flows", "docs"):
        (folder / name).mkdir()
    (folder / "flows" / "__init__.py").touch()
    (folder / "prefect.yaml").touch()
    return folder


@pytest.fixture(scope="module")
def said(other: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a run says, by the place of its worker."""
    nowhere = tmp_path_factory.mktemp("nowhere")
    places = {"another": other, "inside": other / "docs", "its own": CHECKOUT, "none": nowhere}
    command = [sys.executable, "-c", WORKER, *places.values()]
    printed = output_of(*command, PYTHONPATH=str(CHECKOUT))
    return dict(zip(places, printed.splitlines(), strict=True))


@pytest.mark.parametrize("place", ["another", "inside"])
def test_a_worker_in_another_checkout_is_refused(
    said: dict[str, str], other: Path, place: str
) -> None:
    assert said[place].startswith("a Prefect worker must run the flows of the checkout")
    assert f"{CHECKOUT}, by a worker in {other}" in said[place]


@pytest.mark.parametrize("place", ["its own", "none"])
def test_a_worker_in_its_own_checkout_or_in_none_may_run(said: dict[str, str], place: str) -> None:
    assert said[place] == "may run"
