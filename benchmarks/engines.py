"""Prefill of other engines on an exported model: chats of raw ids against the same ids merged.

    umim export umim-smollm2-135m --text "../shared/data/general/*-train.jsonl.gz" --gguf \
        --dtype float32 --out f32
    taskset -c 0 python -m benchmarks.engines --export f32

Every engine that ``tools/engine.sh`` installed reads each chat twice, raw and merged, the second
chat in the other order and so on; its caches of prompts are off. One thread each. What is measured
is the time of a request for one token: CPU seconds of all its processes, and wall seconds. Then it
writes behind the merged chats by greedy search what ``UMIM.generate`` writes, or not. The chats are
documents of general English that no span was chosen on, with a question.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import httpx
import psutil

from benchmarks.runner import Benchmark, Gates, Report, ratio, save, spread
from benchmarks.subjects import CHECKPOINT, GENERAL
from umim_core.errors import ConfigError, CorpusError, require
from umim_core.model.umim import UMIM
from umim_core.serving.prompt_merger import PromptMerger
from umim_core.text.chat_parts import encode_parts, write_chat
from umim_core.text.sources import JsonLines, iter_documents
from umim_core.text.template_process import Chat

SPEEDUP: Final = 1.2  # least, at
REDUCTION: Final = 0.2
ENGINES: Final = Path(os.environ.get("UMIM_ENGINES", Path.home() / ".cache" / "umim" / "engines"))
CONTEXT: Final = 4096  # tokens that a server holds
_QUESTION: Final = "Summarise the text above in two sentences."
_CHARACTERS: Final = (5000, 6000, 7000)  # of a document; 1.0 to 1.7 thousand tokens
_TOKENS: Final = 24  # compared
_SECONDS: Final = 900.0
_STOP_SECONDS: Final = 60.0
Timed = tuple[list[int], float, float]  # ids, wall seconds, CPU seconds
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
    package: str
    program: Path
    command: Callable[[Path, int], Sequence[object]]
    ids: dict[str, Any]
    cold: Callable[[str], dict[str, Any]]  # of a name of the request
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
        "xllamacpp",
        ENGINES / "llama" / "bin" / "python",
        _llama,
        {"return_tokens": True, "verbose": True, "ignore_eos": True},
        lambda request: {"cache_prompt": False},
        lambda choice, document: document["__verbose"]["tokens"],
    ),
    "vllm": Engine(
        "vLLM",
        "vllm-cpu",
        ENGINES / "vllm" / "bin" / "vllm",
        _vllm,
        {"return_token_ids": True, "ignore_eos": True},
        lambda request: {"cache_salt": request},
        lambda choice, document: choice["token_ids"],
    ),
}


@dataclass(frozen=True)
class Running:
    engine: Engine
    url: str
    process: psutil.Process

    def cpu_seconds(self) -> float:
        """Return the CPU time of the server and the processes that it started."""
        total = 0.0
        for process in (self.process, *self.process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:2])  # user, system
        return total

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = httpx.post(self.url + path, json=body, timeout=_SECONDS)
        answer.raise_for_status()
        document: dict[str, Any] = answer.json()
        return document

    def greedy(self, ids: Sequence[int], tokens: int, **fields: Any) -> list[int]:
        """Return the ids that greedy search writes behind a prompt of ids."""
        asked = {"prompt": list(ids), "max_tokens": tokens, "temperature": 0}
        document = self.post("/v1/completions", asked | self.engine.ids | fields)
        return self.engine.answer(document["choices"][0], document)

    def timed(self, ids: Sequence[int], tokens: int) -> Timed:
        """Time a request that no cache of prompts helps."""
        wall, cpu = time.perf_counter(), self.cpu_seconds()
        written = self.greedy(ids, tokens, **self.engine.cold(f"request at {wall}"))
        return written, time.perf_counter() - wall, self.cpu_seconds() - cpu


@contextmanager
def running(engine: Engine, directory: Path, log: IO[bytes]) -> Iterator[Running]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(engine.program), *map(str, engine.command(directory, port))]
    own = os.environ | _ENVIRONMENT
    process = subprocess.Popen(words, stdout=log, stderr=log, env=own, start_new_session=True)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + _SECONDS
    try:
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{engine.name} does not answer")
            time.sleep(1)
        yield Running(engine, url, psutil.Process(process.pid))
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started, too
        process.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


class Prompt(NamedTuple):
    """A chat as ids: raw, merged, and what our engine writes behind it."""

    raw: list[int]
    merged: list[int]
    wanted: list[int]


def read_chats(count: int, kinds: Sequence[str] = ("wiki", "web")) -> Iterator[Chat]:
    """Give chats of one question about one held-out document each, kinds in turn."""
    files = [GENERAL / f"{kind}-test.jsonl.gz" for kind in kinds]
    texts = [iter_documents(JsonLines(paths=(str(file),))) for file in files]
    for number in range(count):
        length = _CHARACTERS[number % len(_CHARACTERS)]
        document = next((t for t in texts[number % len(texts)] if len(t) >= length), None)
        rule = f"{files[number % len(files)]} must hold enough long documents for {count} chats"
        if document is None:
            raise CorpusError(rule, f"too few of {length} characters")
        yield [{"role": "user", "content": f"{document[:length]}\n\n{_QUESTION}"}]


def with_spans(checkpoint: str, export: Path) -> UMIM:
    """Return our engine in float32, with the spans of an exported model as rules."""
    own = UMIM.from_pretrained(checkpoint, dtype="float32", local_files_only=True)
    return UMIM(own.backbone, replace(own.checkpoint, rules=PromptMerger.load(export).rules))


def prompt_of(chat: Chat, umim: UMIM, merger: PromptMerger) -> Prompt:
    """Return a chat's ids, and what our engine writes behind the merged chat."""
    tokenizer = umim.backbone.require_tokenizer()
    written = write_chat(chat, tokenizer, None, merger.roles)
    ids, ranges = encode_parts(tokenizer, written.text, written.places)
    merged = merger.merge(ids, ranges)
    options: dict[str, Any] = {"max_new_tokens": _TOKENS, "do_sample": False, "eos_token_id": None}
    tail = merger.raw_tail
    made = umim.generate([list(chat)], merge="prompt", raw_tail=tail, **options)
    return Prompt(ids.tolist(), merged, [int(token) for token in made.ids[0]])


def measure(ask: Callable[[list[int], int], Timed], prompts: list[Prompt]) -> Report:
    """Time requests for one token behind prompts, and compare answers; ``ask`` gives some tokens.

    Raw and merged ids are asked in turn, of every second prompt the merged first, after a warm-up;
    ratios are by pairs.
    """
    for ids in (prompts[0].raw, prompts[0].merged):
        ask(ids, 1)
    walls, cpus = ({"raw": list[float](), "merged": list[float]()} for _ in range(2))
    for number, prompt in enumerate(prompts):
        for side in ("raw", "merged") if number % 2 == 0 else ("merged", "raw"):
            _, wall, cpu = ask(getattr(prompt, side), 1)
            walls[side].append(wall)
            cpus[side].append(cpu)
    same = [ask(prompt.merged, _TOKENS)[0] == prompt.wanted for prompt in prompts]
    figures: Report = {"equal": sum(same), "compared": len(prompts)}
    for clock, seconds in {"cpu": cpus, "wall": walls}.items():
        figures[clock] = {side: spread(values) for side, values in seconds.items()}
        figures[clock]["times"] = ratio(seconds, "raw", "merged")
    return figures


def version_of(engine: Engine) -> str:
    """Return the version of the package, as the engine's environment has it."""
    code = f"from importlib.metadata import version; print(version({engine.package!r}))"
    command = [str(engine.program.with_name("python")), "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run(options: argparse.Namespace, report: Report) -> None:
    servers = {n: e for n, e in SERVERS.items() if n in options.only and e.program.exists()}
    rule, names = f"an engine must be installed in {ENGINES}", ", ".join(options.only)
    require(bool(servers), ConfigError, rule, f"none of {names}", "See tools/engine.sh.")
    chats = list(read_chats(options.pairs))
    umim, merger = with_spans(options.checkpoint, options.export), PromptMerger.load(options.export)
    prompts = [prompt_of(chat, umim, merger) for chat in chats]
    lengths = [len(prompt.raw) for prompt in prompts]
    report |= {
        "checkpoint": Path(options.checkpoint).name,
        "spans": len(merger.rules),
        "raw_tail": merger.raw_tail,
        "tokens": [min(lengths), max(lengths)],
        "token_reduction": 1 - sum(len(prompt.merged) for prompt in prompts) / sum(lengths),
        "new_tokens": _TOKENS,
        "engines": {},
    }
    for name, engine in servers.items():
        with tempfile.TemporaryFile() as log, running(engine, options.export, log) as server:
            measured = measure(server.timed, prompts)
        about = {"name": engine.name, "version": version_of(engine)}
        report["engines"][name] = about | measured
        save(report, options.out)
    report["equal"] = all(one["equal"] == one["compared"] for one in report["engines"].values())


def gates(report: Report) -> Gates:
    gates = Gates()
    gates.at_least("token reduction", report["token_reduction"], REDUCTION)
    for engine in report["engines"].values():
        gates.at_least(f"{engine['name']}, CPU", engine["cpu"]["times"]["median"], SPEEDUP)
    return gates


BENCHMARK: Final = Benchmark(
    options={
        "checkpoint": CHECKPOINT,
        "export": {"type": Path, "required": True},
        "only": {"nargs": "+", "choices": SERVERS, "default": [*SERVERS]},
        "pairs": 8,
    },
    measure=run,
    gates=gates,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
