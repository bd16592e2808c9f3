"""Positions computed of 100 prompt tokens, by kind of text: ``umim report`` on public texts.

    python -m benchmarks.positions --data FOLDER --out FILE.json

Nothing of the texts enters the results but counts.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from benchmarks.runner import Benchmark, Report
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.text.documents import read_objects
from umim_core.text.sources import expand
from umim_core.traffic.report import traffic_report
from umim_core.traffic.requests import Left, Piece, Request, read_requests


def run(options: argparse.Namespace, report: Report) -> None:
    tokenizer = load_tokenizer(options.tokenizer)
    data: Path = options.data

    def rows(files: str) -> Iterator[Request]:
        return read_requests((str(data / files),), "jsonl", Left())

    functions = [*map(str, expand((str(data / "bfcl" / "*.jsonl*"),)))]
    kinds: dict[str, tuple[str, Iterable[Request]]] = {
        "tool schemas": (
            "functions of the Berkeley leaderboard of function calls, each name once",
            schemas(functions),
        ),
        "schemas without white space": ("the same functions", schemas(functions, (",", ":"))),
        "one server's schemas": ("functions of github-mcp-server", rows("tools/github-mcp.jsonl*")),
        "tool results": ("orders of tau2-bench, as JSON", rows("tools/orders.jsonl*")),
        "code": (
            "the top modules of Python's standard library",
            read_requests((options.code,), "text", Left()),
        ),
        "prose": (
            "general English of eight kinds, from stories to web pages",
            rows("general/*-test.jsonl*"),
        ),
    }
    report |= {"tokenizer": options.tokenizer, "kinds": {}}
    for kind, (source, requests) in kinds.items():
        measured = traffic_report(list(requests), tokenizer, "llama-3.1-8b", 80.0)
        report["kinds"][kind] = {
            "source": source,
            "texts": measured.requests,
            "unseen": measured.held_out,
            "tokens": measured.prompt_tokens,
            "digits": measured.digits,
            "saved": {
                f"{one.longest} tokens, {one.rows} spans": one.all for one in measured.savings
            },
        }


def schemas(
    files: Iterable[str | Path], separators: tuple[str, str] | None = None
) -> list[Request]:
    """Return the functions that questions offer, each name once, as requests of one schema."""
    functions = {
        function["name"]: function
        for file in files
        for _, row in read_objects(file)
        for function in row["function"]
    }
    written = {
        name: json.dumps({"function": function}, separators=separators)
        for name, function in functions.items()
    }
    return [Request(name, name, (Piece("tools", "json", text),)) for name, text in written.items()]


BENCHMARK: Final = Benchmark(
    libraries=("numpy", "transformers"),
    options={
        "data": Path("../shared/data"),
        "tokenizer": "smollm2-135m-instruct",
        "code": f"{sysconfig.get_paths()['stdlib']}/*.py",
    },
    measure=run,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
