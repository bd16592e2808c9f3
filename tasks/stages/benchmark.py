"""Stage ``benchmark``: throughput and break-even, base against UMIM, alone.

Timings are facts of a machine, not functions of the inputs: this stage's digest differs between
runs, and only the report depends on it.
"""

from __future__ import annotations

import json
import os
import platform
import re
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch

from tasks.cluster.lease import ClusterLease
from tasks.cluster.ray_cluster import LOCAL, cluster_address
from tasks.cluster.worker_tasks import call_on_worker, calls_leave_this_process
from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from tasks.stages.corpus import tokens
from tasks.stages.distill import dtype_key
from umim_core.checkpoint.checkpoint_files import resolve_checkpoint
from umim_core.config.evaluate import BenchmarkConfig
from umim_core.config.recipe import BackboneDtype, ClusterConfig, Device
from umim_core.model.umim import UMIM
from umim_core.store.artifacts import directory_digest
from umim_core.store.locking import measuring
from umim_core.throughput.break_even import ThroughputRow, break_even, break_even_markdown
from umim_core.throughput.throughput import measure_throughput, tokens_needed

_FILE = "throughput.json"
_BREAK_EVEN = "break_even"
_MACHINE = "machine.json"


def benchmark_stage(
    root: Path,
    lease: ClusterLease,
    tokenized: Artifact,
    checkpoint: Path | str,
    config: BenchmarkConfig,
    device: Device = "cpu",
    dtype: BackboneDtype = "float32",
) -> Artifact:
    """Time a checkpoint on held-out text.

    A worker has all cores of its machine; in this process it has torch's own threads. The metrics,
    ``prefill_speedup`` among them, are those of the first batch size and the longest prompt under
    the checkpoint's own rules. The key has what is known before (``expected_place``), and
    ``machine.json`` names what was timed on: processor, threads and a GPU.
    """
    directory = resolve_checkpoint(checkpoint).resolve()
    spec = StageSpec(
        "benchmark",
        2,
        {
            **config.model_dump(mode="json"),
            "machine": expected_place(lease.config),
            "device": device,
            **dtype_key(dtype),
        },
        {"tokens": tokenized.digest, "checkpoint": directory_digest(directory)},
        machine=measuring,
    )

    def build(out: Path) -> Metrics:
        timed = partial(time_checkpoint, tokenized, directory, config, device, dtype)
        rows, place = call_on_worker(lease, timed, alone=True)
        _write(out / _MACHINE, place)
        _write(out / _FILE, [asdict(row) for row in rows])
        _write(out / f"{_BREAK_EVEN}.json", [asdict(crossing) for crossing in break_even(rows)])
        (out / f"{_BREAK_EVEN}.md").write_text(break_even_markdown(rows), encoding="utf-8")
        return _summary(rows, config)

    return run_stage(root, spec, build)


def time_checkpoint(
    tokenized: Artifact,
    checkpoint: Path,
    config: BenchmarkConfig,
    device: Device,
    dtype: BackboneDtype,
) -> tuple[list[ThroughputRow], str]:
    """Return the rows of a checkpoint, and what they were measured on: see ``machine.json``."""
    umim = UMIM.from_pretrained(checkpoint, dtype=dtype, device=device)
    test = tokens(tokenized, "test")
    # Each pair of runs begins one continuation further on, then round again.
    text = test[: tokens_needed(config) + config.pairs * config.new_tokens]
    rows = measure_throughput(umim.merged_model, np.asarray(text, dtype=np.int64), config)
    place = machine(torch.get_num_threads())
    return rows, place if device == "cpu" else f"{place}, {torch.cuda.get_device_name()}"


def expected_place(config: ClusterConfig) -> str:
    """Return where a timing will run, as far as it is known without a cluster and without CUDA.

    On this machine these are its processor and the threads: torch's own in this process, all cores
    of the cluster on a worker. Of a cluster elsewhere it is the address.
    """
    if not calls_leave_this_process(config):
        return machine(torch.get_num_threads())
    address = cluster_address(config.address)
    return address if address != LOCAL else machine(config.cpus or os.cpu_count() or 1)


def machine(threads: int) -> str:
    """Return the name of this machine's processor, and so many threads."""
    processor, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.is_file():
        model = re.search(r"^model name\s*: (.*)$", info.read_text(encoding="utf-8"), re.MULTILINE)
        processor = model[1] if model else processor
    return f"{processor}, {threads} threads"


def _write(path: Path, rows: object) -> None:
    path.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _summary(rows: list[ThroughputRow], config: BenchmarkConfig) -> Metrics:
    shown = config.batch_sizes[0], max(config.prompt_lengths)
    return {
        name: value
        for row in rows
        if row.rules == "natural" and (row.batch_size, row.prompt_tokens) == shown
        for name, value in (
            (f"{row.phase}_speedup", row.speedup),
            (f"{row.phase}_bound", row.bound),
            (f"{row.phase}_token_reduction", row.token_reduction),
        )
    }


def throughput_rows(artifact: Artifact) -> list[ThroughputRow]:
    """Return the rows a benchmark stage measured."""
    rows = json.loads((artifact.path / _FILE).read_text(encoding="utf-8"))
    return [ThroughputRow(**row) for row in rows]
