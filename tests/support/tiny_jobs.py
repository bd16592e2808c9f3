"""Training jobs over the files of one folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tasks.training.train_worker import run_worker
from umim_core.training.train_job import TrainJob


def tiny_job(folder: Path, max_tokens: int, config: dict[str, object], **own: object) -> TrainJob:
    """Distil ``rows`` on ``backbone`` by ``rules``, all in the folder, but for one's own fields."""
    job = TrainJob(
        objective="distill",
        backbone=str(folder / "backbone"),
        revision=None,
        rules=str(folder / "rules"),
        train=str(folder / "rows"),
        valid=str(folder / "rows"),
        start=None,
        form={},
        max_tokens=max_tokens,
        seed=0,
        config=config,
        strategy="ddp",
        use_gpu=False,
        out="",
    )
    return replace(job, **own)


def train_jobs(_: int, *jobs: dict[str, object]) -> None:
    """Run jobs one after the other on one rank."""
    for job in jobs:
        run_worker(job)
