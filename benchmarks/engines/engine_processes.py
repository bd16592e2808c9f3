"""Servers of other engines as processes on loopback, with the CPU time that they take."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import httpx
import psutil

ENGINES: Final = Path(os.environ.get("UMIM_ENGINES", Path.home() / ".cache" / "umim" / "engines"))
CONTEXT: Final = 4096  # tokens that a server holds
COMPLETIONS: Final = "/v1/completions"
_SECONDS: Final = 900.0
_STOP_SECONDS: Final = 60.0
# One thread, so that CPU time and wall time say the same on a quiet core; nothing is sent home.
_ENVIRONMENT: Final = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCHDYNAMO_DISABLE": "1",  # eager vLLM compiles a few functions, for minutes
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Engine:
    """An engine's server: how it is started, and what its requests need besides a prompt."""

    name: str
    program: Path
    command: Callable[[Path, int], Sequence[object]]
    ids: dict[str, Any]
    cold: Callable[[int], dict[str, Any]]
    answer: Callable[[dict[str, Any], dict[str, Any]], list[int]]


def _llama(directory: Path, port: int) -> Sequence[object]:
    return Path(__file__).with_name("llama_server.py"), directory / "model.gguf", port, CONTEXT


def _vllm(directory: Path, port: int) -> Sequence[object]:
    place = ("serve", directory, "--host", "127.0.0.1", "--port", port, "--enforce-eager")
    numbers = ("--dtype", "float32", "--max-model-len", CONTEXT, "--max-num-seqs", 4)
    cache = ("--enable-prefix-caching", "--block-size", 32, "--enable-prompt-tokens-details")
    return *place, *numbers, *cache, "--tokenizer-mode", "umim"


SERVERS: Final = {
    "llama": Engine(
        "llama.cpp's server",
        ENGINES / "llama" / "bin" / "python",
        _llama,
        {"return_tokens": True, "verbose": True, "ignore_eos": True},
        lambda number: {"cache_prompt": False},
        lambda choice, document: document["__verbose"]["tokens"],
    ),
    "vllm": Engine(
        "vLLM",
        ENGINES / "vllm" / "bin" / "vllm",
        _vllm,
        {"return_token_ids": True, "ignore_eos": True},
        lambda number: {"cache_salt": f"request {number}"},
        lambda choice, document: choice["token_ids"],
    ),
}


class Running:
    """An engine's server that answers."""

    def __init__(self, engine: Engine, url: str, process: subprocess.Popen[bytes]) -> None:
        self.engine, self.url = engine, url
        self._process = psutil.Process(process.pid)

    def cpu_seconds(self) -> float:
        """Return the CPU time of the server and the processes that it started."""
        processes = [self._process, *self._process.children(recursive=True)]
        total = 0.0
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request."""
        answer = httpx.post(self.url + path, json=body, timeout=_SECONDS)
        answer.raise_for_status()
        document = answer.json()
        assert isinstance(document, dict)
        return document

    def greedy(self, ids: Sequence[int], tokens: int, **fields: Any) -> list[int]:
        """Return the ids that greedy search writes behind a prompt of ids."""
        asked = {"prompt": list(ids), "max_tokens": tokens, "temperature": 0}
        document = self.post(COMPLETIONS, asked | self.engine.ids | fields)
        return self.engine.answer(document["choices"][0], document)


@contextmanager
def running(engine: Engine, directory: Path, log: IO[bytes]) -> Iterator[Running]:
    """Run an engine's server on an exported model until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(engine.program), *map(str, engine.command(directory, port))]
    environment = {**os.environ, **_ENVIRONMENT}
    process = subprocess.Popen(words, stdout=log, stderr=log, env=environment)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + _SECONDS
    try:
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{engine.name} does not answer")
            time.sleep(1)
        yield Running(engine, url, process)
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and the processes that it started."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    _, left = psutil.wait_procs(family, timeout=5)
    for child in left:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(left, timeout=5)
    process.kill()
    process.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
