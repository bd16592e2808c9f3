"""Training jobs over the files of one folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tasks.training.train_worker import run_worker
from umim_core.config.recipe import DistillConfig, PreferenceConfig
from umim_core.training.train_job import TrainJob


def tiny_job(
    folder: Path, max_tokens: int, config: DistillConfig | PreferenceConfig, **fields: object
) -> TrainJob:
    """Train on ``rows`` and ``backbone`` by ``rules``, all in the folder, but for given fields."""
    job = TrainJob(
        backbone=str(folder / "backbone"),
        rules=str(folder / "rules"),
        config=config,
        max_tokens=max_tokens,
        train=str(folder / "rows"),
        valid=str(folder / "rows"),
    )
    return replace(job, **fields)


def train_jobs(_: int, *jobs: TrainJob) -> None:
    for job in jobs:
        run_worker(job)
