"""Stage ``distill``: train the merge module of one cell on Ray Train."""

from __future__ import annotations

from pathlib import Path

from tasks.cluster.lease import ClusterLease
from tasks.run.stage import Artifact, Metrics, StageSpec, run_stage
from tasks.stages.corpus import tokens
from tasks.training.train_worker import launch
from umim_core.backbone.fingerprint import backbone_identity
from umim_core.config.recipe import (
    BackboneDtype,
    Cell,
    ClusterConfig,
    DistillConfig,
    PreferenceConfig,
    Recipe,
    RunRecipe,
)
from umim_core.training.token_rows import TokenRows
from umim_core.training.train_job import TrainJob
from umim_core.training.train_run import place_rows

Optimisation = DistillConfig | PreferenceConfig


def distill_stage(
    root: Path,
    lease: ClusterLease,
    recipe: Recipe,
    cell: Cell,
    tokenized: Artifact,
    filtered: Artifact,
) -> Artifact:
    """Distil the frozen backbone into a merge module for one rule set.

    The artifact holds ``checkpoint/``, ``curve.jsonl`` and ``summary.json``. A killed build resumes
    from its last state and ends with the same bytes (CPU, float32 weights).
    """
    optimisation = recipe.distill
    spec = StageSpec(
        "distill",
        4,
        {
            **training_key(recipe, cell, optimisation),
            **cell.form(),
            "segment_length": recipe.segment_length,
        },
        {
            "rules": filtered.digest,
            "backbone": backbone_identity(cell.backbone, cell.revision),
            **{split: tokenized.folder_digest(split) for split in ("train", "valid")},
        },
        resumable=True,
    )

    def build(out: Path) -> Metrics:
        rows = {
            split: TokenRows.of_segments(tokens(tokenized, split), recipe.segment_length)
            for split in ("train", "valid")
        }
        rules, length = filtered.path / "rules", recipe.segment_length
        job = cell_job(recipe, cell, optimisation, out, rules, length)
        return train_on_rows(job, rows, lease)

    return run_stage(root, spec, build)


def training_key(recipe: RunRecipe, cell: Cell, optimisation: Optimisation) -> dict[str, object]:
    """Return the configuration that all trainings of a cell's module have in their keys."""
    return {
        "backbone": cell.backbone,
        "revision": cell.revision,
        "train": optimisation.model_dump(),
        "seed": recipe.seed,
        **parallelism(recipe.cluster),
    }


def cell_job(
    recipe: RunRecipe,
    cell: Cell,
    optimisation: Optimisation,
    out: Path,
    rules: Path | None,
    max_tokens: int,
    start: Path | None = None,
) -> TrainJob:
    """Return a distillation of a cell's module over the rows ``train`` and ``valid``."""
    return TrainJob(
        objective="distill",
        backbone=cell.backbone,
        revision=cell.revision,
        rules=None if rules is None else str(rules),
        train="train",
        valid="valid",
        start=None if start is None else str(start),
        form=cell.form(),
        max_tokens=max_tokens,
        seed=recipe.seed,
        config=optimisation.model_dump(),
        strategy=recipe.cluster.strategy,
        use_gpu=recipe.cluster.use_gpu,
        out=str(out),
    )


def parallelism(cluster: ClusterConfig) -> dict[str, object]:
    """Return the cluster settings that decide the bits of a training result."""
    return {
        "workers": max(1, cluster.workers),
        "strategy": cluster.strategy,
        "use_gpu": cluster.use_gpu,
    }


def dtype_key(dtype: BackboneDtype) -> dict[str, object]:
    """Return the backbone's data type for a stage's key: nothing if it is float32."""
    return {} if dtype == "float32" else {"dtype": dtype}


def train_on_rows(job: TrainJob, rows: dict[str, TokenRows], lease: ClusterLease) -> Metrics:
    """Write a job's rows below its state folder (which is not published) and run it."""
    return launch(place_rows(job, rows), lease)
