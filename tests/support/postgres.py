"""A server of Postgres on loopback, killed and started again as often as a test likes."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from support.servers import free_port

_SECONDS: Final = 60.0


class Postgres:
    """One cluster of databases behind one port.

    It does not run as root: there, the user of Debian's package has it.
    """

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            self._user = {"user": "postgres", "group": "postgres", "extra_groups": []}
            shutil.chown(folder, "postgres", "postgres")
        options = ["--auth=trust", "--username=umim", "--encoding=UTF8", "--no-sync"]
        self._run(["initdb", f"--pgdata={folder / 'data'}", *options]).wait(_SECONDS)
        self.start()

    def start(self) -> None:
        """Start it and wait until it takes connections."""
        settings = [f"port={self.port}", "listen_addresses=127.0.0.1", "unix_socket_directories="]
        options = [word for setting in settings for word in ("-c", setting)]
        self._process = self._run(["postgres", "-D", str(self._folder / "data"), *options])
        self.execute("SELECT 1")

    def kill(self) -> None:
        """Kill it with its children, as the end of a machine would."""
        family = [psutil.Process(self._process.pid)]
        for process in family + family[0].children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(_SECONDS)

    def execute(self, statement: str) -> None:
        """Execute a statement as soon as there is a connection."""
        import psycopg2

        deadline = time.monotonic() + _SECONDS
        while True:
            try:
                connection = psycopg2.connect(self.url("postgresql", "postgres"))
                break
            except psycopg2.OperationalError:
                assert time.monotonic() < deadline, (self._folder / "log").read_text("utf-8")
                time.sleep(0.1)
        connection.autocommit = True
        connection.cursor().execute(statement)
        connection.close()

    def url(self, scheme: str, database: str) -> str:
        """The address of a database, for a driver."""
        return f"{scheme}://umim@127.0.0.1:{self.port}/{database}"

    def _run(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, cwd="/", **self._user)


@contextmanager
def postgres() -> Iterator[Postgres]:
    """Run one until the block ends; the test is skipped without its programs or MLflow's driver."""
    pytest.importorskip("psycopg2", reason="MLflow on Postgres needs umim[server]")
    if shutil.which("initdb") is None:
        pytest.skip("Postgres is not there: its initdb is not in PATH")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # one that its user may enter
        server = Postgres(Path(folder))
        try:
            yield server
        finally:
            server.kill()
