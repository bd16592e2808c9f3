"""Stages ``evaluate`` (alignment, perplexity) and ``task-score`` (accuracy through lm-eval).

The model runs on a worker of the cluster or in this process; see ``cluster/worker_tasks.py``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tasks.cluster.lease import ClusterLease
from tasks.cluster.worker_tasks import call_on_worker
from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from tasks.stages.corpus import PART, out_of_domain, parts, task_of, tokens
from tasks.stages.distill import dtype_key
from umim_core.checkpoint.checkpoint_files import read_config, resolve_checkpoint
from umim_core.config.evaluate import EvaluateConfig, Segments
from umim_core.config.form import Merge
from umim_core.config.recipe import BackboneDtype, Device
from umim_core.evaluation.alignment import evaluate_alignment
from umim_core.evaluation.multiple_choice import evaluate_task
from umim_core.evaluation.perplexity import perplexity
from umim_core.merging.merged_model import MergedModel
from umim_core.model.umim import UMIM
from umim_core.store.artifacts import directory_digest
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
    """Load a checkpoint and return its ``text_metrics``."""
    umim = UMIM.from_pretrained(checkpoint, dtype=dtype, device=device)
    return text_metrics(tokenized, umim.merged_model, config, segment_length)


def text_metrics(
    tokenized: Artifact,
    merged_model: MergedModel,
    config: EvaluateConfig,
    segment_length: int,
) -> Metrics:
    """Return alignment in-domain, and perplexity of base and compressed in and out of domain.

    Of a mixture's parts both are measured; the names of those numbers end in ``_part_<name>``.
    ``nats_increase`` is ln(PPL of UMIM / PPL of base). Standard errors (``_se``) are over rows, of
    the increase over the differences row by row.
    """
    own = [f"{PART}{name}" for name in parts(tokenized)]
    metrics: Metrics = {}
    for split in ("test", *own):
        rows = rows_of(tokenized, split, segment_length, config.alignment_rows, config.segments)
        alignment = evaluate_alignment(rows, merged_model, config.batch_size).metrics()
        metrics |= {f"{name}{_suffix(split)}": value for name, value in alignment.items()}
    for split in ("test", *(f"ood_{name}" for name in out_of_domain(tokenized)), *own):
        part = rows_of(tokenized, split, segment_length, config.perplexity_rows, config.segments)
        metrics |= _perplexities(part, merged_model, _suffix(split), config.batch_size)
    return metrics


def _suffix(split: str) -> str:
    return "" if split == "test" else f"_{split}"


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


def _perplexities(
    rows: list[NDArray[np.int32]],
    merged_model: MergedModel,
    suffix: str,
    batch_size: int,
) -> Metrics:
    base = perplexity(rows, merged_model.base(), batch_size)
    ours = perplexity(rows, merged_model, batch_size)
    increase, increase_error = ours.increase_over(base)
    errors = {
        "nats_base_se": base.nats_error,
        "nats_umim_se": ours.nats_error,
        "nats_increase_se": increase_error,
    }
    return {
        f"ppl_base{suffix}": base.ppl,
        f"ppl_umim{suffix}": ours.ppl,
        f"ppl_token_reduction{suffix}": ours.token_reduction,
        f"nats_increase{suffix}": increase,
        **{f"{name}{suffix}": error for name, error in errors.items() if error is not None},
    }


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
            "merge": "context" if merge == "prompt" else merge,  # as in its first keys
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
        return call_on_worker(lease, asked).metrics()

    return run_stage(root, spec, build)
