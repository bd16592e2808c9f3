"""Stage ``benchmark``: prefill and decode throughput, base against UMIM.

Timings are facts of a machine, not functions of the inputs: this stage's digest differs between
runs, and only the report depends on it.
"""

from __future__ import annotations

import json
import os
import platform
import re
from pathlib import Path

import numpy as np
import torch

from tasks.corpus import tokens
from tasks.evaluate import load_pair
from tasks.stage import Artifact, Metrics, StageSpec, run_stage
from umim_core.artifacts import directory_digest
from umim_core.benchmarking.throughput import ThroughputRow, measure_throughput
from umim_core.checkpoint import resolve_checkpoint
from umim_core.config import BenchmarkConfig
from umim_core.rules.matcher import Matcher

_FILE = "throughput.json"


def benchmark_stage(
    root: Path,
    tokenized: Artifact,
    checkpoint: Path | str,
    config: BenchmarkConfig,
    device: str = "cpu",
) -> Artifact:
    """Time a checkpoint on held-out text; ``prefill_speedup`` is that of the longest prompt."""
    directory = resolve_checkpoint(checkpoint)
    spec = StageSpec(
        "benchmark",
        1,
        {**config.model_dump(mode="json"), "machine": machine(device)},
        {"tokens": tokenized.digest, "checkpoint": directory_digest(directory)},
    )

    def build(out: Path) -> Metrics:
        loaded, backbone = load_pair(directory, device)
        rows = measure_throughput(
            backbone,
            loaded.module,
            Matcher(loaded.rules),
            np.asarray(tokens(tokenized, "test")[: max(config.prompt_lengths)], dtype=np.int64),
            prompt_lengths=config.prompt_lengths,
            new_tokens=config.new_tokens,
            warmup=config.warmup,
            pairs=config.pairs,
        )
        text = json.dumps([row.as_dict() for row in rows], indent=1, sort_keys=True)
        (out / _FILE).write_text(text + "\n", encoding="utf-8")
        return _summary(rows, max(config.prompt_lengths))

    return run_stage(root, spec, build)


def machine(device: str) -> str:
    """Return what a timing was taken on: processor, cores and, for a GPU, its name."""
    names = [platform.processor() or platform.machine(), f"{os.cpu_count()} cores"]
    info = Path("/proc/cpuinfo")
    if info.is_file():
        found = re.search(r"^model name\s*: (.*)$", info.read_text(encoding="utf-8"), re.MULTILINE)
        names[0] = found[1] if found else names[0]
    if device != "cpu":
        names.append(torch.cuda.get_device_name())
    return ", ".join(names)


def _summary(rows: list[ThroughputRow], length: int) -> Metrics:
    return {
        name: value
        for row in rows
        if row.rules == "natural" and row.prompt_tokens == length
        for name, value in (
            (f"{row.phase}_speedup", row.speedup),
            (f"{row.phase}_bound", row.bound),
            (f"{row.phase}_token_reduction", row.token_reduction),
        )
    }


def throughput_rows(artifact: Artifact) -> list[ThroughputRow]:
    """Return the rows a benchmark stage measured."""
    found = json.loads((artifact.path / _FILE).read_text(encoding="utf-8"))
    return [ThroughputRow(**row) for row in found]
