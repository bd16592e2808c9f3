"""The engine on SmolLM2-135M, its shipped rules and real text: a table, then one JSON line.

    python -m benchmarks.engine_smollm2 --out docs/results/engine-smollm2.json

A case is a data type, a number of rows and a prompt length. ``--out`` is written after each. With
``--commit`` the same command goes on behind those that it holds, if commit, machine, checkpoint and
text are the same: if it was stopped, or for one case at a time (``--cases 1``). The text is cut
into passages of 64 tokens, taken from the kinds of ``../shared/data/general`` in turn (test split);
where that is absent, the docstrings' test split.

Rules against no rules: alternating pairs on prompts of their own, both sides generating the text
that follows. Our engine without rules against ``transformers.generate``: greedy, ids compared.
Where the time of a prefill goes is read from one profiled run of each side. Gates: those of P4.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.common import Benchmark, Gate, Report, at_least, at_most, go_on, save
from benchmarks.engine import DECODE_RATIO, LOGITS_ERROR, MERGING_SHARE, PREFILL_OF_BOUND
from benchmarks.engine_sides import (
    DYNAMIC,
    OURS,
    Ids,
    Subject,
    generation_sides,
    logits_error,
    merging_seconds,
    prefill_parts,
)
from benchmarks.timing import alternate, ratio, spread
from umim_core.benchmarking.throughput import measure_throughput
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.benchmark import BenchmarkConfig
from umim_core.embedded.docstring_corpus import held_out_text
from umim_core.model.umim import UMIM
from umim_core.store.artifacts import digest_of, sha256_bytes, sha256_file
from umim_core.text.sources import JsonLines
from umim_core.text.tokens import iter_token_pieces

CHECKPOINT: Final = "umim-smollm2-135m"
GENERAL: Final = Path(__file__).resolve().parents[2] / "shared" / "data" / "general"
PASSAGE: Final = 64  # tokens
_FEWEST_PAIRS: Final = 3


def pairs_of(options: argparse.Namespace, prompt_tokens: int) -> int:
    """Return how many pairs a case gets: as many as a side may read tokens for, 3 at least."""
    return max(_FEWEST_PAIRS, min(options.pairs, options.tokens_per_side // prompt_tokens))


def text_files(folder: Path = GENERAL) -> list[Path]:
    """Return the files of general text, none where there is no such folder."""
    return sorted(folder.glob("*-test.jsonl.gz"))


def text_digest(folder: Path = GENERAL) -> str:
    """Return the SHA-256 of the text that ``general_text`` reads."""
    sums = {file.name: sha256_file(file) for file in text_files(folder)}
    return digest_of(sums) if sums else sha256_bytes(held_out_text().encode())


def general_text(umim: UMIM, tokens: int, folder: Path = GENERAL) -> tuple[str, Ids]:
    """Return what held-out text this is, and its ids: passages of every kind of text in turn.

    Args:
        umim: Whose tokenizer encodes it.
        tokens: How many are needed.
        folder: Files ``KIND-test.jsonl.gz``; where there is none, docstrings are read.
    """
    files = text_files(folder)
    if not files:
        ids = np.array(umim.backbone.encode(held_out_text()), dtype=np.int64)
        return "docstrings of the installed packages, test split", ids[:tokens]
    tokenizer = umim.backbone.require_tokenizer()
    passages = -(-tokens // (PASSAGE * len(files)))
    kinds = []
    for file in files:
        pieces, found = [], 0
        for piece, _ in iter_token_pieces(JsonLines(paths=(str(file),)), tokenizer):
            pieces.append(piece)
            found += len(piece)
            if found >= passages * PASSAGE:
                break
        kinds.append(np.resize(np.concatenate(pieces), (passages, PASSAGE)))
    names = ", ".join(file.name.removesuffix("-test.jsonl.gz") for file in files)
    ids = np.stack(kinds, axis=1).reshape(-1).astype(np.int64)
    return f"general English ({names}), test split, passages of {PASSAGE} tokens in turn", ids


def measure_case(
    given: Subject, batch_size: int, length: int, options: argparse.Namespace
) -> Report:
    """Measure one number of rows and prompt length in the backbone's data type."""
    new, total = options.new_tokens, batch_size * length
    config = BenchmarkConfig(
        prompt_lengths=(length,),
        batch_sizes=(batch_size,),
        new_tokens=new,
        warmup=0,
        pairs=pairs_of(options, total),
        token_reductions=(),
    )
    prompts = given.ids[:total].reshape(batch_size, length)
    rows = measure_throughput(given.compressed, given.ids, config, continuation="text")
    prefill = next(row for row in rows if row.phase == "prefill")
    merging = merging_seconds(given, prompts, _FEWEST_PAIRS)
    found: Report = {
        "phases": {row.phase: asdict(row) for row in rows},
        "merging": {
            "seconds": spread(merging),
            "share": float(np.median(merging)) / prefill.umim_seconds,
        },
    }
    if total <= options.compared_tokens:
        found["against_transformers"] = compare(given, prompts, new)
    if length == min(options.lengths):
        found["logits_error"] = logits_error(given, prompts, new)
    if batch_size == 1:
        found["parts"] = prefill_parts(given, prompts)
    return found


def compare(given: Subject, prompts: Ids, new_tokens: int) -> Report:
    """Run our engine without rules and transformers in turn, and compare their ids."""
    ids: dict[str, list[list[int]]] = {}
    every = generation_sides(given.backbone, prompts, new_tokens)
    sides = {name: every[name] for name in (OURS, DYNAMIC)}
    seconds = alternate(sides, _FEWEST_PAIRS, warmed=ids.__setitem__)
    return {
        "seconds": spread(seconds[DYNAMIC]),
        "seconds_ours": spread(seconds[OURS]),
        "times_ours": ratio(seconds, DYNAMIC, OURS),
        "equal": ids[DYNAMIC] == ids[OURS],
    }


def gates(report: Report) -> dict[str, Gate]:
    """Return value, limit and verdict of every gate of the cases measured so far."""
    found: dict[str, Gate] = {}
    for name, case in report["cases"].items():
        prefill, decode = case["phases"]["prefill"], case["phases"]["decode"]
        share = prefill["speedup"] / prefill["bound"]
        found[f"{name}, prefill of bound"] = at_least(share, PREFILL_OF_BOUND)
        found[f"{name}, decode"] = at_least(decode["speedup"], DECODE_RATIO)
        found[f"{name}, merging share"] = at_most(case["merging"]["share"], MERGING_SHARE)
        if "against_transformers" in case:
            times = case["against_transformers"]["times_ours"]["median"]
            found[f"{name}, against transformers"] = at_least(times, 1.0)
        if "logits_error" in case and name.startswith("float32"):
            limit = 0.0 if prefill["batch_size"] == 1 else 1.0
            found[f"{name}, logits"] = at_most(case["logits_error"] / LOGITS_ERROR, limit)
    return found


def equal(report: Report) -> bool:
    """Return whether ids and logits in float32 are transformers' own."""
    ids = all(
        case["against_transformers"]["equal"]
        for name, case in report["cases"].items()
        if name.startswith("float32") and "against_transformers" in case
    )
    return ids and all(gate[2] for name, gate in gates(report).items() if name.endswith("logits"))


def settings_of(options: argparse.Namespace, folder: Path = GENERAL) -> Report:
    """Return what decides the figures of a case, besides machine, commit and the case itself."""
    names = ("new_tokens", "pairs", "tokens_per_side", "compared_tokens")
    checkpoint = Checkpoint.load(options.checkpoint)
    return {
        **{name: getattr(options, name) for name in names},
        "checkpoint": Path(options.checkpoint).name,
        "module": checkpoint.module.digest(),
        "rules": checkpoint.rules.digest,
        "unit_positions": checkpoint.config.unit_positions,
        "backbone": checkpoint.config.backbone_fingerprint,
        "text": text_digest(folder),
    }


def run(options: argparse.Namespace, report: Report) -> None:
    """Measure the cases that are missing."""
    report["settings"] = settings_of(options)
    report["cases"] = {}
    go_on(report, options.out, ["settings"], ["subject", "cases"])
    left = options.cases
    for dtype in options.dtypes:
        shapes = itertools.product(options.batch_sizes, options.lengths)
        names = {f"{dtype}, {b} x {length}": (b, length) for b, length in shapes}
        missing = [name for name in names if name not in report["cases"]][:left]
        if not missing:
            continue
        umim = UMIM.from_pretrained(options.checkpoint, dtype=dtype)
        tokens = max(options.batch_sizes) * max(options.lengths)
        text, ids = general_text(umim, tokens + (options.pairs + 1) * options.new_tokens)
        given = Subject(umim.compressed, ids)
        report["subject"] = {
            "backbone": Path(umim.backbone.name).name,
            "rules": len(umim.rules),
            "text": text,
        }
        warm_up(given, options.new_tokens)
        for name in missing:
            report["cases"][name] = measure_case(given, *names[name], options)
            save(report, options.out)
        left -= len(missing)


def warm_up(given: Subject, new_tokens: int) -> None:
    """Generate once on each side: compiles, and tabulates the module."""
    config = BenchmarkConfig(
        prompt_lengths=(PASSAGE,), new_tokens=new_tokens, warmup=0, pairs=1, token_reductions=()
    )
    measure_throughput(given.compressed, given.ids, config, continuation="text")


main = Benchmark(
    name="engine_smollm2",
    doc=__doc__,
    options={
        "checkpoint": CHECKPOINT,
        "dtypes": ["float32", "bfloat16"],
        "lengths": [512, 1024, 2048, 4096],
        "batch_sizes": [1, 4],
        "new_tokens": 24,
        "pairs": 10,
        "tokens_per_side": 6144,
        "compared_tokens": 2048,
        "cases": 99,
    },
    measure=run,
    gates=gates,
    equal=equal,
).main


if __name__ == "__main__":
    sys.exit(main())
