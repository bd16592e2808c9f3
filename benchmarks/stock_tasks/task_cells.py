"""Cells of ``stock_tasks``: one task of lm-eval scored by one side."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import Report
from umim_core.evaluation.scored_requests import Tally
from umim_core.store.artifacts import sha256_bytes

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from lm_eval.api.task import Task


@contextmanager
def rows_kept_in(folder: Path) -> Iterator[None]:
    """Let ``datasets`` keep the rows that it reads in a folder.

    It finds rows again by the names of their files: in its own cache, those of another folder that
    stood for the hub would be taken for these.
    """
    from datasets import config

    before, config.HF_DATASETS_CACHE = config.HF_DATASETS_CACHE, folder
    try:
        yield
    finally:
        config.HF_DATASETS_CACHE = before


def score_cell(model: LM, task: Task, limit: int | None) -> Report:
    """Score one task by one side.

    Returns:
        Per question the log-likelihood of every answer and whether the answer is right, the tokens
        and units that went in, and the seconds from the loaded task to its metrics.
    """
    from umim_core.evaluation.tasks.task_runs import run_task

    with _counted(model) as tallies:
        began = time.perf_counter()
        metrics, samples = run_task(model, task, limit)
        seconds = time.perf_counter() - began
    samples = sorted(samples, key=lambda sample: int(sample["doc_id"]))
    names = [name for name in ("acc", "acc_norm") if f"{name},none" in metrics]
    return {
        "questions": len(samples),
        "of": len(task.eval_docs),
        "split": task.config.test_split or task.config.validation_split,
        "documents": sha256_bytes("".join(sample["doc_hash"] for sample in samples).encode()),
        "log_likelihoods": [[resp[0] for resp in found["filtered_resps"]] for found in samples],
        **{name: [int(sample[name]) for sample in samples] for name in names},
        "reported": {name: metrics[f"{name},none"] for name in names},
        "inputs": vars(tallies[0]),
        "contexts": vars(tallies[1]),
        "seconds": seconds,
    }


@contextmanager
def _counted(model: LM) -> Iterator[tuple[Tally, Tally]]:
    """Count the tokens and units of inputs, and of contexts alone, of one task."""
    from umim_core.evaluation.harness import UmimLM

    tallies = Tally(), Tally()
    scorer = model.scorer if isinstance(model, UmimLM) else None
    if scorer is not None:
        scorer.inputs, scorer.contexts = tallies
    yield tallies
