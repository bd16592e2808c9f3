"""Stages ``evaluate`` (alignment, perplexity), ``task-score`` (accuracy), ``benchmark`` (speed).

The model runs on a worker of the cluster or in this process; see ``cluster/lease.py``.
Timings are facts of a machine, not functions of the inputs: the digest of ``benchmark`` differs
between runs, and only the report depends on it.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from tasks.run.stage import Artifact, Metrics, Site, machine_name, stage
from tasks.stages.corpus import PART, split_tokens, splits_with
from tasks.stages.named import NamedCheckpoint, Questions
from umim_core.config.corpus import OOD
from umim_core.config.evaluate import BenchmarkConfig, EvaluateConfig, Segments
from umim_core.config.form import Merge
from umim_core.evaluation.alignment import evaluate_alignment
from umim_core.evaluation.perplexity import perplexity_figures
from umim_core.evaluation.questions import evaluate_task
from umim_core.model.umim import UMIM
from umim_core.store.artifacts import read_json, write_json
from umim_core.store.locking import measuring
from umim_core.text.token_ids import spread_rows
from umim_core.throughput.break_even import ThroughputRow
from umim_core.throughput.throughput import measure_throughput, tokens_needed
from umim_core.training.token_rows import TokenRows

_PLACED: Final = ("device", "dtype")


@stage(version=6, of_run=_PLACED, free={"config.task_questions": "of stage task-score"})
def evaluate_stage(
    _: Path,
    site: Site,
    *,
    tokens: Artifact,
    checkpoint: NamedCheckpoint,
    config: EvaluateConfig,
    segment_length: int,
) -> Metrics:
    """Measure alignment in-domain, and perplexity of base and UMIM in and out of domain.

    Of a mixture's parts both are measured; the names of those numbers end in ``_part_<name>``.
    Standard errors (``_se``) are over rows, of which a short text has fewer than are asked for.
    """
    directory, device, dtype = checkpoint.directory, site.device, site.dtype

    def measure() -> Metrics:
        merged_model = UMIM.from_pretrained(directory, dtype=dtype, device=device).merged_model
        metrics, further = Metrics(), splits_with(tokens, OOD)
        for split in ("test", *further, *splits_with(tokens, PART)):
            rows = rows_of(tokens, split, segment_length, config.perplexity_rows, config.segments)
            figures = perplexity_figures(rows, merged_model, config.batch_size)
            figures["perplexity_rows"] = float(len(rows))
            if split not in further:
                rows = rows_of(
                    tokens, split, segment_length, config.alignment_rows, config.segments
                )
                figures |= evaluate_alignment(rows, merged_model, config.batch_size).metrics()
                figures["alignment_rows"] = float(len(rows))
            suffix = "" if split == "test" else f"_{split}"
            metrics |= {f"{name}{suffix}": value for name, value in figures.items()}
        return metrics

    return site.lease.call(measure)


def rows_of(
    tokenized: Artifact,
    split: str,
    segment_length: int,
    count: int,
    segments: Segments = "first",
) -> list[NDArray[np.integer]]:
    """Return so many rows [L] of a test split, fewer if it has fewer."""
    cut = TokenRows.of_segments(split_tokens(tokenized, split), segment_length)
    first = range(min(count, len(cut)))
    chosen = spread_rows(len(cut), count) if segments == "spread" else first
    return [cut.row(index) for index in chosen]


@stage(version=3, of_run=_PLACED)
def task_score_stage(
    _: Path,
    site: Site,
    *,
    questions: Questions,
    checkpoint: NamedCheckpoint,
    merge: Merge,
    limit: int,
) -> Metrics:
    """Measure accuracy on a task; ``merge="none"`` is the base model.

    The base model's score does not depend on the module, so its key holds the backbone alone
    (``NamedBase``) and every checkpoint of that backbone finds the same result.
    """
    score = partial(
        evaluate_task,
        checkpoint.directory,
        questions.file("test"),
        questions.form,
        merge=merge,
        limit=limit,
        dtype=site.dtype,
        device=site.device,
    )
    return site.lease.call(score)


@stage(version=3, of_run=(*_PLACED, "machine"), machine=measuring)
def benchmark_stage(
    out: Path,
    site: Site,
    *,
    tokens: Artifact,
    checkpoint: NamedCheckpoint,
    config: BenchmarkConfig,
) -> Metrics:
    """Time a checkpoint on held-out text.

    A worker has all cores of its machine; in this process it has torch's own threads. The metrics,
    ``prefill_speedup`` among them, are those of the first batch size and the longest prompt under
    the checkpoint's own rules. The key has what is known of the machine before, and
    ``machine.json`` names what was timed on: processor, threads and a GPU.
    """
    directory, device, dtype = checkpoint.directory, site.device, site.dtype

    def measure() -> tuple[list[ThroughputRow], str]:
        umim = UMIM.from_pretrained(directory, dtype=dtype, device=device)
        # Each pair of runs begins one continuation further on, then round again.
        needed = tokens_needed(config) + config.pairs * config.new_tokens
        text = np.asarray(split_tokens(tokens, "test")[:needed], dtype=np.int64)
        rows = measure_throughput(umim.merged_model, text, config)
        place = machine_name(torch.get_num_threads())
        return rows, place if device == "cpu" else f"{place}, {torch.cuda.get_device_name()}"

    rows, place = site.lease.call(measure, alone=True)
    write_json(out / "machine.json", place)
    write_json(out / "throughput.json", [asdict(row) for row in rows])
    shown = config.batch_sizes[0], max(config.prompt_lengths)
    return {
        f"{row.phase}_{name}": getattr(row, name)
        for row in rows
        if row.rules == "natural" and (row.batch_size, row.prompt_tokens) == shown
        for name in ("speedup", "bound", "token_reduction")
    }


def throughput_rows(artifact: Artifact) -> list[ThroughputRow]:
    rows: Any = read_json(artifact.path / "throughput.json")
    return [ThroughputRow(**row) for row in rows]
