"""Services that take seconds to start are shared: a Ray cluster, Prefect, MLflow, a fork server.

A file that asks for one of them is grouped with the others that do: they run one after the other,
before all other files, and on one worker of pytest-xdist. `make test` spreads groups and files over
its workers (`--dist loadfile`). The cluster is closed before the first file that does not ask for
it, so that tests about starting clusters find none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from umim_core.store.locking import directory_lock

_CLUSTER = pytest.StashKey[ExitStack]()
# Fixtures that are worth sharing, and the group of the files that ask for them.
_GROUPS = {
    "two_cores": "services",
    "prefect_server": "services",
    "using_prefect": "services",
    "tiny_run": "tiny run",
    "run_ranks": "ranks",  # the fork server of training_processes.py, which imports torch
    "start_ranks": "ranks",
}


@cache
def _asks_for(path: Path) -> tuple[str, ...]:
    """Return the shared fixtures that a file of tests names."""
    source = path.read_text(encoding="utf-8")
    return tuple(name for name in _GROUPS if re.search(rf"\b{name}\b", source))


def group_of(path: Path) -> str:
    """Return what a file of tests is scheduled with: a group, or itself."""
    return next((_GROUPS[name] for name in _asks_for(path)), str(path))


def _place(path: Path) -> tuple[int, ...]:
    """Return where a file stands among all: the grouped ones first."""
    asked, names = _asks_for(path), list(_GROUPS)
    return tuple(names.index(name) for name in asked) or (len(names),)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _place(item.path))
    for item in items:  # one of them starts the service, however slow or busy the machine is
        if _asks_for(item.path) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


class _Grouped(LoadFileScheduling):
    """Sends a group of files, or one file, to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(self.config.rootpath / nodeid.partition("::")[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _Grouped | None:
    return _Grouped(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if "two_cores" not in _asks_for(item.path):
        _close(item.config)


def pytest_sessionfinish(session: pytest.Session) -> None:
    _close(session.config)


def _close(config: pytest.Config) -> None:
    if _CLUSTER in config.stash:
        config.stash[_CLUSTER].close()
        del config.stash[_CLUSTER]


@pytest.fixture(scope="module")
def two_cores(request: pytest.FixtureRequest) -> None:
    """A Ray cluster of two cores runs; every lease and `ray_cluster` of this process joins it."""
    from tasks.cluster.ray_cluster import ray_cluster

    if _CLUSTER not in request.config.stash:
        stack = request.config.stash[_CLUSTER] = ExitStack()
        stack.enter_context(ray_cluster(cpus=2, object_store_bytes=200 << 20))


class PrefectServer(NamedTuple):
    url: str
    database: Path


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    """A Prefect server with a database of its own; ``using_prefect`` runs flows against it."""
    from prefect.logging.handlers import APILogWorker
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import PREFECT_SERVER_DATABASE_CONNECTION_URL, temporary_settings

    from support.servers import free_port

    database = tmp_path_factory.mktemp("prefect") / "prefect.db"
    server = SubprocessASGIServer(port=free_port())
    address = f"sqlite+aiosqlite:///{database}"
    with temporary_settings({PREFECT_SERVER_DATABASE_CONNECTION_URL: address}):
        server.start(timeout=240)
    try:
        yield PrefectServer(server.api_url, database)
    finally:
        # What is still to be sent when the server is gone is tried for over a minute at exit.
        APILogWorker.drain_all(timeout=120)
        server.stop()


@pytest.fixture(scope="module")
def using_prefect(prefect_server: PrefectServer) -> Iterator[PrefectServer]:
    """Flows of this file run against the shared server."""
    from prefect import context
    from prefect.settings import PREFECT_API_URL, temporary_settings

    settings = temporary_settings({PREFECT_API_URL: prefect_server.url})
    with settings, pytest.MonkeyPatch.context() as patch:
        # A thread without a context of its own reads these; a line that it logs would otherwise
        # start a second, temporary server, which nobody ends.
        patch.setattr(context, "GLOBAL_SETTINGS_CONTEXT", context.SettingsContext.get())
        yield prefect_server


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of MLflow without anything in it, to be copied; making its tables takes seconds."""
    from mlflow import MlflowClient

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "empty-store"
    with directory_lock(folder, wait_seconds=None):  # the workers of a run make one
        if not (folder / "done").exists():
            folder.mkdir()
            MlflowClient(f"sqlite:///{folder / 'mlflow.db'}").search_experiments()
            (folder / "done").touch()
    return folder / "mlflow.db"
