"""Stages ``evaluate`` (alignment, perplexity) and ``task-score`` (accuracy through lm-eval)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from tasks.stages.corpus import out_of_domain, tokens
from tasks.stages.distill import dtype_key
from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.checkpoint.checkpoint import Checkpoint, resolve_checkpoint
from umim_core.config.recipe import BackboneDtype, Device, EvaluateConfig
from umim_core.distill.token_rows import TokenRows
from umim_core.evaluation.alignment import evaluate_alignment
from umim_core.evaluation.multiple_choice import evaluate_task
from umim_core.evaluation.perplexity import perplexity
from umim_core.rules.matcher import Matcher
from umim_core.store.artifacts import directory_digest


def evaluate_stage(
    root: Path,
    tokenized: Artifact,
    checkpoint: Path | str,
    config: EvaluateConfig,
    segment_length: int,
    device: Device = "cpu",
    dtype: BackboneDtype = "float32",
) -> Artifact:
    """Measure alignment in-domain, and perplexity of base and UMIM in and out of domain.

    Args:
        root: Artifact root.
        tokenized: Token ids of the test splits.
        checkpoint: Checkpoint directory or embedded name.
        config: How many rows.
        segment_length: Tokens per row L.
        device: Where the model runs.
        dtype: Data type of the backbone, as its checkpoint was distilled with.
    """
    directory = resolve_checkpoint(checkpoint)
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
        loaded, backbone = load_pair(directory, device, dtype)
        matcher = Matcher(loaded.rules)

        def rows(split: str, count: int) -> list[np.ndarray]:
            cut = TokenRows.of_segments(tokens(tokenized, split), segment_length).take(count)
            return [cut.row(index) for index in range(len(cut))]

        metrics = evaluate_alignment(
            rows("test", config.alignment_rows),
            backbone,
            loaded.module,
            matcher,
            config.batch_size,
            unit_positions=loaded.config.unit_positions,
        ).metrics()
        for split in ("test", *(f"ood_{name}" for name in out_of_domain(tokenized))):
            suffix = "" if split == "test" else f"_{split}"
            part = rows(split, config.perplexity_rows)
            metrics |= _perplexities(part, backbone, loaded, matcher, suffix, config.batch_size)
        return metrics

    return run_stage(root, spec, build)


def load_pair(directory: Path, device: Device, dtype: BackboneDtype) -> tuple[Checkpoint, Backbone]:
    """Load a checkpoint and the backbone it belongs to, both on one device."""
    loaded = Checkpoint.load(directory)
    config = loaded.config
    backbone = load_backbone(
        config.backbone, revision=config.backbone_revision, dtype=dtype, device=device
    )
    loaded.check_backbone(backbone)
    loaded.module.to(backbone.device)
    return loaded, backbone


def _perplexities(
    rows: list[np.ndarray],
    backbone: Backbone,
    checkpoint: Checkpoint,
    matcher: Matcher,
    suffix: str,
    batch_size: int,
) -> Metrics:
    base = perplexity(rows, backbone, None, None, batch_size)
    ours = perplexity(
        rows,
        backbone,
        checkpoint.module,
        matcher,
        batch_size,
        unit_positions=checkpoint.config.unit_positions,
    )
    return {
        f"ppl_base{suffix}": base.ppl,
        f"ppl_umim{suffix}": ours.ppl,
        f"ppl_token_reduction{suffix}": ours.token_reduction,
    }


def task_score_stage(
    root: Path,
    task: Artifact,
    checkpoint: Path | str,
    merge: Literal["context", "none"],
    config: EvaluateConfig,
    device: Device = "cpu",
    dtype: BackboneDtype = "float32",
) -> Artifact:
    """Measure accuracy on the embedded task; ``merge="none"`` is the base model.

    The base model's score does not depend on the module, so its key holds the backbone alone and
    every checkpoint of that backbone finds the same result.
    """
    directory = resolve_checkpoint(checkpoint)
    loaded = Checkpoint.load(directory)
    source = loaded.config.backbone_fingerprint if merge == "none" else directory_digest(directory)
    spec = StageSpec(
        "task-score",
        1,
        {"merge": merge, "questions": config.task_questions, "device": device, **dtype_key(dtype)},
        {"task": task.digest, "model": source},
    )

    def build(_: Path) -> Metrics:
        return evaluate_task(
            loaded,
            merge=merge,
            data=task.path,
            limit=config.task_questions,
            dtype=dtype,
            device=device,
        ).metrics()

    return run_stage(root, spec, build)
