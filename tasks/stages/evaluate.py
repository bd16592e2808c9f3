"""Stages ``evaluate`` (alignment, perplexity), ``task-score`` (accuracy), ``benchmark`` (speed).

The model runs on a worker of the cluster or in this process; see ``cluster/worker_tasks.py``.
Timings are facts of a machine, not functions of the inputs: the digest of ``benchmark`` differs
between runs, and only the report depends on it.
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
from numpy.typing import NDArray

from tasks.cluster.lease import ClusterLease
from tasks.cluster.ray_cluster import LOCAL, cluster_address
from tasks.cluster.worker_tasks import call_on_worker, calls_leave_this_process
from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from tasks.stages.corpus import OOD, PART, splits_with, task_of, tokens
from tasks.stages.train import dtype_key
from umim_core.checkpoint.checkpoint_files import read_config, resolve_checkpoint
from umim_core.config.evaluate import BenchmarkConfig, EvaluateConfig, Segments
from umim_core.config.form import Merge
from umim_core.config.recipe import BackboneDtype, ClusterConfig, Device
from umim_core.evaluation.alignment import evaluate_alignment
from umim_core.evaluation.perplexity import perplexity_figures
from umim_core.evaluation.questions import evaluate_task
from umim_core.model.umim import UMIM
from umim_core.store.artifacts import directory_digest
from umim_core.store.locking import measuring
from umim_core.throughput.break_even import ThroughputRow, break_even, break_even_markdown
from umim_core.throughput.throughput import measure_throughput, tokens_needed
from umim_core.training.token_rows import TokenRows


def evaluate_stage(
    root: Path,
    lease: ClusterLease,
    tokenized: Artifact,
    checkpoint: Path | str,
    config: EvaluateConfig,
    segment_length: int,
    device: Device = "cpu",
    dtype: BackboneDtype = "float32",
) -> Artifact:
    """Measure alignment in-domain, and perplexity of base and UMIM in and out of domain."""
    directory = resolve_checkpoint(checkpoint).resolve()
    spec = StageSpec(
        "evaluate",
        4,
        {
            **config.model_dump(exclude={"task_questions"}),
            "segment_length": segment_length,
            "device": device,
            **dtype_key(dtype),
        },
        {"tokens": tokenized.digest, "checkpoint": directory_digest(directory)},
    )

    def build(_: Path) -> Metrics:
        measured = (tokenized, directory, config, segment_length, device, dtype)
        return call_on_worker(lease, partial(measure_texts, *measured))

    return run_stage(root, spec, build)


def measure_texts(
    tokenized: Artifact,
    checkpoint: Path,
    config: EvaluateConfig,
    segment_length: int,
    device: Device,
    dtype: BackboneDtype,
) -> Metrics:
    """Return alignment in-domain, and perplexity of base and compressed in and out of domain.

    Of a mixture's parts both are measured; the names of those numbers end in ``_part_<name>``.
    Standard errors (``_se``) are over rows.
    """
    merged_model = UMIM.from_pretrained(checkpoint, dtype=dtype, device=device).merged_model
    own = splits_with(tokenized, PART)
    metrics: Metrics = {}
    for split in ("test", *own):
        rows = rows_of(tokenized, split, segment_length, config.alignment_rows, config.segments)
        alignment = evaluate_alignment(rows, merged_model, config.batch_size).metrics()
        suffix = "" if split == "test" else f"_{split}"
        metrics |= {f"{name}{suffix}": value for name, value in alignment.items()}
    for split in ("test", *splits_with(tokenized, OOD), *own):
        part = rows_of(tokenized, split, segment_length, config.perplexity_rows, config.segments)
        suffix = "" if split == "test" else f"_{split}"
        figures = perplexity_figures(part, merged_model, config.batch_size)
        metrics |= {f"{name}{suffix}": value for name, value in figures.items()}
    return metrics


def rows_of(
    tokenized: Artifact,
    split: str,
    segment_length: int,
    count: int,
    segments: Segments = "first",
) -> list[NDArray[np.int32]]:
    """Return so many rows [L] of a test split, fewer if it has fewer."""
    cut = TokenRows.of_segments(tokens(tokenized, split), segment_length)
    count = min(count, len(cut))
    step = len(cut) if segments == "spread" else count
    return [cut.row(index * step // count) for index in range(count)]


def task_score_stage(
    root: Path,
    lease: ClusterLease,
    task: Artifact,
    checkpoint: Path | str,
    merge: Merge,
    config: EvaluateConfig,
    device: Device = "cpu",
    dtype: BackboneDtype = "float32",
) -> Artifact:
    """Measure accuracy on a task; ``merge="none"`` is the base model.

    The base model's score does not depend on the module, so its key holds the backbone alone and
    every checkpoint of that backbone finds the same result.
    """
    directory = resolve_checkpoint(checkpoint).resolve()
    base = merge == "none"
    source = read_config(directory).backbone_fingerprint if base else directory_digest(directory)
    of = task_of(task)
    spec = StageSpec(
        "task-score",
        1,
        {
            "merge": merge,
            "questions": config.task_questions,
            "device": device,
        }
        | dtype_key(dtype)
        | of.key(),
        {"task": task.digest, "model": source},
    )

    def build(_: Path) -> Metrics:
        asked = partial(
            evaluate_task,
            directory,
            merge=merge,
            task=of.name,
            data=task.path,
            limit=config.task_questions,
            dtype=dtype,
            device=device,
        )
        return call_on_worker(lease, asked)

    return run_stage(root, spec, build)


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
        for name, content in {
            "machine": place,
            "throughput": [asdict(row) for row in rows],
            "break_even": break_even(rows),
        }.items():
            text = json.dumps(content, indent=1, sort_keys=True) + "\n"
            (out / f"{name}.json").write_text(text, encoding="utf-8")
        (out / "break_even.md").write_text(break_even_markdown(rows), encoding="utf-8")
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
    rows = json.loads((artifact.path / "throughput.json").read_text(encoding="utf-8"))
    return [ThroughputRow(**row) for row in rows]
