"""The engine against transformers.generate, and merging against none: a table, then one JSON line.

    python -m benchmarks.engine --out docs/results/engine.json
    python -m benchmarks.engine --backbones umim-docs-llama --prompt-lengths 512 --pairs 3
    python -m benchmarks.engine --backbones umim-smollm2-135m --dtype bfloat16

First our engine without rules and ``transformers.generate`` with both caches, ids compared; then
rules against no rules, on alternating pairs, with the roofline as a guard. What is generated there
is the text that follows each prompt, on both sides: a model of random weights loops, and a
loop holds no natural rules. A checkpoint other than the small ones reads general English: passages
of 64 tokens of the kinds of ``../shared/data/general`` in turn (test split), docstrings where that
is absent. Gates: P4 of docs/performance.md, and logits under an empty rule set that are
transformers' own bit for bit at batch size 1 and within 1e-5 in batches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.runner import Benchmark, Gates, Report, alternate, ratio, save, spread
from benchmarks.subjects import BACKBONES, Ids, Subject, subject
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.devices import default_device
from umim_core.backbone.model_files import DTYPES
from umim_core.config.evaluate import BenchmarkConfig
from umim_core.config.model_base import validated
from umim_core.inference.batch import read_prompts
from umim_core.inference.engine import Engine
from umim_core.inference.options import GenerateOptions
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.throughput.break_even import ThroughputRow
from umim_core.throughput.throughput import measure_throughput, tokens_needed

OURS: Final = "ours"
CACHES: Final = {"transformers, dynamic cache": "dynamic", "transformers, static cache": "static"}
PREFILL_OF_BOUND: Final = 0.9
PREFILL_FROM: Final = 512
DECODE_RATIO: Final = 0.98
MERGING_SHARE: Final = 0.03
LOGITS_ERROR: Final = 1e-5
SETTINGS: Final[dict[str, object]] = {  # fields of BenchmarkConfig
    "prompt_lengths": [256, 512, 896],
    "batch_sizes": [1, 8],
    "new_tokens": 64,
    "token_reductions": [0.1, 0.2, 0.3, 0.4, 0.5],
    "pairs": 10,
    "warmup": 2,
}


def transformers_generate(
    backbone: Backbone, prompts: Ids, new_tokens: int, cache: str
) -> tuple[list[list[int]], Sequence[Tensor]]:
    """Return generated ids of raw ids [B, L], and the logits [B, V] of every step."""
    ids = torch.tensor(prompts, device=backbone.device)
    generate: Any = backbone.model.generate  # not in the types of all models
    with torch.no_grad():
        found = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation=cache,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return found.sequences[:, prompts.shape[1] :].tolist(), found.logits


def merging_share(subject: Subject, row: ThroughputRow, rounds: int) -> Report:
    """Return what matching, packing, merging and embedding take of a prefill by natural rules.

    At a merge depth above 0 the module merges states of the same shape, and nothing is embedded.
    """
    model, backbone = subject.merged_model, subject.backbone
    prompts = subject.ids[: row.batch_size * row.prompt_tokens].reshape(row.batch_size, -1)
    ids = torch.tensor(prompts, device=backbone.device)
    states = backbone.embed(ids)  # of the shape of the states before the merge depth

    @torch.no_grad()
    def run() -> object:
        packed = read_prompts(list(prompts), None, model).packed
        if model.merge_depth:
            return model.states_of(ids, states, packed.ends, packed.lengths)
        return model.embed(packed)

    seconds = alternate({"": run}, rounds)[""]
    return {
        "prompt_tokens": row.prompt_tokens,
        "batch_size": row.batch_size,
        "seconds": spread(seconds),
        "share": float(np.median(seconds)) / row.umim_seconds,
    }


def logits_error(subject: Subject, prompts: Ids, new_tokens: int) -> float:
    """Return the largest difference of any logit from transformers', under an empty rule set.

    It is infinite where the ids differ. Prompts are raw ids [B, L].
    """
    seen: list[Tensor] = []
    empty = Matcher(RuleSet.from_spans([]))
    options = GenerateOptions(
        max_new_tokens=new_tokens, observer=lambda forward: seen.append(forward.logits.clone())
    )
    ours = Engine(subject.merged_model.merging_by(empty)).generate(list(prompts), options)
    ids, logits = transformers_generate(subject.backbone, prompts, new_tokens, "dynamic")
    if [list(row.ids) for row in ours.rows] != ids:
        return float("inf")
    return max(float((a - b).abs().max()) for a, b in zip(seen, logits, strict=True))


def measure(subject: Subject, config: BenchmarkConfig) -> Report:
    gated = [length for length in config.prompt_lengths if length >= PREFILL_FROM]
    length = min(gated or config.prompt_lengths)
    engines, errors = {}, {}
    for batch_size in config.batch_sizes:
        prompts = subject.ids[: batch_size * length].reshape(batch_size, length)
        engines[str(batch_size)] = compare_engines(subject, prompts, config)
        errors[str(batch_size)] = logits_error(subject, prompts, config.new_tokens)
    rows = measure_throughput(subject.merged_model, subject.ids, config, continuation="text")
    return {
        "engine_prompt_tokens": length,
        "engines": engines,
        "logits_error": errors,
        "rows": [asdict(row) for row in rows],
        "merging": [
            merging_share(subject, row, config.pairs)
            for row in rows
            if (row.phase, row.rules) == ("prefill", "natural")
        ],
    }


def compare_engines(subject: Subject, prompts: Ids, config: BenchmarkConfig) -> Report:
    """Run our engine without rules and transformers in turn behind raw ids [B, L]; compare ids."""
    engine = Engine(subject.merged_model.base())
    options = GenerateOptions(max_new_tokens=config.new_tokens)

    def ours() -> list[list[int]]:
        return [list(row.ids) for row in engine.generate(list(prompts), options).rows]

    def theirs(cache: str) -> list[list[int]]:
        return transformers_generate(subject.backbone, prompts, config.new_tokens, cache)[0]

    ids: dict[str, list[list[int]]] = {}
    sides: dict[str, Callable[[], list[list[int]]]] = {OURS: ours}
    sides |= {name: partial(theirs, cache) for name, cache in CACHES.items()}
    seconds = alternate(sides, config.pairs, warmed=ids.__setitem__)
    return {
        name: {
            "seconds": spread(seconds[name]),
            "new_tokens_per_s": prompts.shape[0] * config.new_tokens / np.median(seconds[name]),
            "times_ours": ratio(seconds, name, OURS),
            "equal": ids[name] == ids[OURS],
        }
        for name in sides
    }


def gates(report: Report) -> Gates:
    gates = Gates()
    for backbone, measured in report["backbones"].items():
        for batch_size, sides in measured["engines"].items():
            for side, values in sides.items():
                if side != OURS:
                    gate = f"{backbone}_b{batch_size}_against_{side.replace(', ', '_')}"
                    gates.at_least(gate.replace(" ", "_"), values["times_ours"]["median"], 1.0)
        for row in measured["rows"]:
            gate = f"{backbone}_b{row['batch_size']}_{row['prompt_tokens']}_{row['rules']}"
            if row["asked_reduction"] not in (None, 0.5):  # of the break-even table only
                continue
            if row["phase"] == "prefill" and row["prompt_tokens"] >= PREFILL_FROM:
                share = row["speedup"] / row["bound"]
                gates.at_least(f"{gate}_prefill_of_bound", share, PREFILL_OF_BOUND)
            if row["phase"] == "decode":
                gates.at_least(f"{gate}_decode", row["speedup"], DECODE_RATIO)
        for part in measured["merging"]:
            if part["prompt_tokens"] >= PREFILL_FROM:
                gate = f"{backbone}_b{part['batch_size']}_{part['prompt_tokens']}_merging_share"
                gates.at_most(gate, part["share"], MERGING_SHARE)
        if report["dtype"] != "float32":  # elsewhere sums of other orders round differently
            continue
        for batch_size, error in measured["logits_error"].items():
            limit = 0.0 if batch_size == "1" else LOGITS_ERROR
            name = f"{backbone}_b{batch_size}_logits"
            gates.at_most(name, error / LOGITS_ERROR, limit / LOGITS_ERROR)
    return gates


def run(options: argparse.Namespace, report: Report) -> None:
    chosen = {name: getattr(options, name) for name in SETTINGS}
    config = validated(BenchmarkConfig, chosen, "the options")
    tokens = tokens_needed(config) + (config.pairs + config.warmup) * config.new_tokens
    report |= {"device": options.device, "dtype": options.dtype, "new_tokens": config.new_tokens}
    report["backbones"] = {}
    for name in options.backbones:
        backbone_subject = subject(name, tokens, dtype=options.dtype, device=options.device)
        report |= {"text": backbone_subject.text} if backbone_subject.text else {}
        report["backbones"][Path(name).name] = measure(backbone_subject, config)
        save(report, options.out)
    report["equal"] = options.dtype != "float32" or all(
        values["equal"]
        for measured in report["backbones"].values()
        for sides in measured["engines"].values()
        for values in sides.values()
    )


BENCHMARK: Final = Benchmark(
    options=SETTINGS
    | {
        "backbones": list(BACKBONES),
        "dtype": {"default": "float32", "choices": tuple(DTYPES)},
        "device": default_device(),
    },
    measure=run,
    gates=gates,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
