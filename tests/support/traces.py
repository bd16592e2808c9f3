"""Exposure of a run: its sockets, its command lines, and secrets in the files it leaves."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from tasks.cluster.ray_cluster import listening_addresses

# What a person may have in the environment when a run starts; none of it belongs into a result.
CANARIES: Mapping[str, str] = {
    "HF_TOKEN": "hf_canaryQdXcKpTzLmNvBwRsYg",
    "MLFLOW_TRACKING_USERNAME": "canary-user-6f1d",
    "MLFLOW_TRACKING_PASSWORD": "canary-password-83b2",
    "MLFLOW_TRACKING_TOKEN": "canary-bearer-19ce",
    "AWS_SECRET_ACCESS_KEY": "canary/aws/secret/77aa",
}


def traces(folders: Iterable[Path], secrets: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (secret's name, file) for every file that holds a secret, plain or in base64."""
    found, forms = [], {}
    for name, secret in secrets.items():
        forms[name] = (secret.encode(), base64.b64encode(secret.encode()).rstrip(b"="))
    for folder in folders:
        for path in [folder] if folder.is_file() else sorted(folder.rglob("*")):
            with suppress(OSError):  # sockets, and files of processes that are just ending
                data = path.read_bytes() if path.is_file() else b""
                found += [(n, str(path)) for n in forms if any(form in data for form in forms[n])]
    return found


class Descendants:
    """Watch this process and all that it starts, for the length of ``with`` blocks."""

    def __init__(self, *variables: str) -> None:
        self.sockets: set[tuple[str, str, int]] = set()  # process name, address, port
        self.command_lines: set[str] = set()
        self.values: set[str] = set()  # of the variables in the processes' environments
        self._variables = variables
        self._seen: set[psutil.Process] = set()
        self._done = threading.Event()

    def __enter__(self) -> Descendants:
        self._done.clear()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(1.0):
            self.sockets |= set(listening_addresses())
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    self.command_lines.add(" ".join(process.cmdline()))
                    if process not in self._seen:
                        self._seen.add(process)
                        inherited = process.environ()
                        self.values |= {inherited[v] for v in self._variables if v in inherited}
