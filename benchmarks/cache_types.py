"""Function calls behind a quantised cache: llama.cpp's server, by the type of its keys and values.

    python -m benchmarks.cache_types --model FILE.gguf --bfcl FOLDER --out FILE.json

A control beside merging: the engine's own way to a smaller cache. The server of
``tools/engine.sh llama`` reads the ids that ``benchmarks.calls`` gives the base model, of the same
questions, and its greedy replies are scored as there. Flash attention reads all types; each is
compared with the first. ``--few``, ``--after`` and ``--answers`` are as in ``benchmarks.calls``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from benchmarks.answering import kept, kept_right
from benchmarks.calls import ASKED, NEW, calls_of, is_right, read_questions
from benchmarks.engines import SERVERS, about, llama, running
from benchmarks.runner import Benchmark, Report, save, tell
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.errors import ConfigError, CorpusError, require
from umim_core.store.artifacts import sha256_file
from umim_core.text.chat_parts import write_chat
from umim_core.text.token_ids import encode, spread_rows

TYPES: Final = ("f16", "q8_0", "q4_0")


def bits(kind: str) -> float:
    """Return the bits of a value of a ggml type, scales included."""
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    return 8 * size / values


def figures(kind: str, right: Sequence[bool], base: Sequence[bool]) -> Report:
    """Return the figures of a type by which calls are right, against those of the first."""
    cost = {"type": kind, "bits": bits(kind), "cache_saved": 1 - bits(kind) / bits(TYPES[0])}
    return cost | kept_right(right, base)


def reply_all(
    kind: str, prompts: Sequence[list[int]], options: argparse.Namespace, decides: list[object]
) -> list[list[int]]:
    """Return what a server with a cache of a type writes behind each prompt; ids of both."""
    engine = replace(SERVERS["llama"], command=lambda model, port: llama(model, port, kind))
    with tempfile.TemporaryFile() as log, running(engine, options.model, log) as server:
        ask = partial(server.greedy, tokens=NEW, ignore_eos=False, cache_prompt=False)
        return [kept(options.answers, [*decides, kind, ids], partial(ask, ids)) for ids in prompts]


def run(options: argparse.Namespace, report: Report) -> None:
    found = list(read_questions(options.bfcl, options.most, options.after))
    questions = [found[n] for n in spread_rows(len(found), options.few)]
    require(bool(questions), CorpusError, "--after, --most and --few must leave questions", "none")
    tokenizer = load_tokenizer(str(options.model))
    chats = [write_chat(one.messages, tokenizer, one.tools) for one in questions]
    prompts = [encode(tokenizer, chat.text) for chat in chats]
    program = SERVERS["llama"].program
    rule = "llama.cpp's server must be installed"
    require(program.exists(), ConfigError, rule, str(program), "Run `tools/engine.sh llama`.")
    engine = about("llama", SERVERS["llama"].name)
    report |= {"backbone": options.model.stem, "engine": engine, "questions": len(questions)}
    report |= {"after": options.after, "new_tokens": NEW, "sides": []}
    decides = [engine, sha256_file(options.model), NEW]
    base = list[bool]()
    for kind in TYPES:
        replies = reply_all(kind, prompts, options, decides)
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in replies]
        right = [is_right(calls_of(t), q.accepted) for t, q in zip(texts, questions, strict=True)]
        base = base or right
        report["sides"].append(figures(kind, right, base))
        tell(report["sides"][-1])
        save(report, options.out)


BENCHMARK: Final = Benchmark(
    options=ASKED | {"model": {"type": Path, "required": True}}, measure=run
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
