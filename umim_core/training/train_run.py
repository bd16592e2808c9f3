"""One training run from its job to its files, on one rank: the pipeline's and ``umim train``'s."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from torch import distributed as dist
from torch import nn

from umim_core.adaptation.control import Control, write_control
from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.backbone.model_identity import weight_lines
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.recipe import Device, TrainConfig
from umim_core.errors import ArtifactError, BackboneError, ConfigError
from umim_core.mining.counting import thread_count
from umim_core.progress import duration, leave_note
from umim_core.progress import logger as progress_logger
from umim_core.store.artifacts import read_json, write_json
from umim_core.store.publication import STATE, publish_directory
from umim_core.text.shards import TokenShards
from umim_core.training.optimizer import Strategy
from umim_core.training.token_rows import TokenRows
from umim_core.training.train_job import TrainJob, job_config, make_objective, start_of
from umim_core.training.train_loop import train
from umim_core.training.train_ranks import rank_and_world, ranks_where
from umim_core.training.train_state import Progress, drop_states, load_parameters

logger = logging.getLogger("umim.train")
CURVE: Final = "curve.jsonl"
_SUMMARY: Final = "summary.json"
MakeStrategy = Callable[[nn.Module, TrainConfig], Strategy]


def run_job(job: TrainJob, make_strategy: MakeStrategy) -> None:
    """Train on one rank; rank 0 writes the result, curve and summary into the job's directory.

    The result is ``checkpoint/``, or ``control/`` where the job trains a control.
    """
    out = Path(job.out)
    state = out / STATE
    config = job_config(job)
    _say(state, "loading the backbone")
    device: Device = "cuda" if job.use_gpu else "cpu"
    dtype = config.backbone_dtype(device)
    backbone = load_backbone(job.backbone, revision=job.revision, dtype=dtype, device=device)
    most = backbone.max_positions
    if most is not None and job.max_tokens > most:
        raise ConfigError(
            f"rows must have at most {most} tokens, the positions of {job.backbone}",
            job.max_tokens,
            "Lower the segment length, or max_tokens of an adaptation.",
        )
    start = start_of(job, backbone)
    objective = make_objective(job, start)
    if not job.use_gpu:
        warn_of_idle_cores()
    _say(state, "measuring before the first step")
    result = train(
        objective,
        make_strategy(objective, config),
        config,
        seed=job.seed,
        state_dir=state,
        on_step=step_reporter(state),
        on_plan=plan_reporter(config),
    )
    _require_untouched(backbone, state)
    if rank_and_world()[0] != 0:
        return
    load_parameters(objective.module, result.weights)
    origin = _summary(result.progress) | {"seed": job.seed}
    trained: tuple[str, Callable[[Path], None]] = (
        ("control", partial(write_control, start, origin))
        if isinstance(start, Control)
        else ("checkpoint", Checkpoint.of(start, origin).write)
    )
    write_results(out, *trained, result.progress, backbone_fingerprint=backbone.fingerprint)


def _require_untouched(backbone: Backbone, state: Path) -> None:
    """Refuse, on every rank, a backbone whose weights are not those that were loaded.

    The states and the scores of the start go: steps were taken with other weights, nobody knows
    which. Weights are hashed as for a fingerprint, so changes below the rounding of bfloat16 do not
    count; it takes half a second for 135 M weights in float32.

    An attempt is checked once, at its end. What a killed attempt saved is resumed unchecked: the
    next one loads the weights again, and answers for its own steps alone. A check before every save
    would cost a model of 8 G weights, in proportion, half a minute each time.
    """
    touched = ranks_where(weight_lines(backbone.model) != backbone.identity.weights)
    if touched:
        if rank_and_world()[0] == 0:
            drop_states(state)
        raise BackboneError(
            f"the frozen weights of {backbone.name} must be as they were loaded",
            f"others on ranks {touched} after training",
            "Memory or code is at fault; no state is kept, the same command starts afresh.",
        )


def place_rows(job: TrainJob, rows: Mapping[str, TokenRows]) -> TrainJob:
    """Write a job's rows below its state folder, which is not published, and name them.

    A killed attempt leaves whole rows or none. Rows that name their shards are written anew: the
    root may have moved.
    """
    data = Path(job.out) / STATE / "rows"
    for split, part in rows.items():
        if isinstance(part.ids, TokenShards):
            shutil.rmtree(data / split, ignore_errors=True)
        if not (data / split).exists():
            publish_directory(data / split, part.save)
    return replace(job, train=str(data / job.train), valid=str(data / job.valid))


def _say(state: Path, text: str) -> None:
    """Leave a note of what happens before the first step, which may take minutes."""
    if rank_and_world()[0] == 0:
        leave_note(state, 0, 0, text)


def warn_of_idle_cores() -> None:
    """Say so where OMP_NUM_THREADS leaves cores idle for hours.

    Ray gives its workers a thread each whether or not it is set; they are the ones in a group.
    """
    limit, cores = os.environ.get("OMP_NUM_THREADS", ""), thread_count(None)
    if limit.isdecimal() and int(limit) < cores and not dist.is_initialized():
        logger.warning(
            "training computes with at most %s thread(s) where this machine has %d cores for it; "
            "unset OMP_NUM_THREADS to use them",
            limit,
            cores,
        )


def step_reporter(state: Path) -> Callable[[Progress, int], None]:
    """Return what rank 0 calls after each step: a note for the driver's bar, a log line in ten."""
    points: dict[str, tuple[int, float]] = {}

    def report(progress: Progress, total: int) -> None:
        row: dict[str, float] = {}  # a step leaves one row, and one more where it validates
        for part in progress.curve[-2:]:
            row |= part if part["step"] == progress.step else {}
        points.update({x: (progress.step, value) for x, value in row.items() if x != "step"})
        loss = row.get("train_loss")
        text = "training" if loss is None else f"training, loss {loss:.3f}"
        leave_note(state, progress.step, total, text, points)
        if progress.step % 10 == 0:
            logger.info("step %d of %d: %s", progress.step, total, row)

    return report


def plan_reporter(config: TrainConfig) -> Callable[[int, int, float | None], None]:
    """Return what rank 0 calls before the first step: a line with the time that all will take.

    A step reads a batch by the base model and by UMIM, and goes back through the latter: one and a
    half times what the validation of as many rows takes. The later lines count what was measured.
    """

    def report(steps: int, validations: int, seconds: float | None) -> None:
        line = (
            f"{steps:,} steps of {config.batch_size} rows and {validations} validations of at most "
            f"{config.validation_rows} rows"
        )
        if seconds is not None:
            step = 1.5 * seconds * config.batch_size / config.validation_rows
            line += (
                f": about {step:.2g} s a step and {seconds:.2g} s a validation, "
                f"{duration(steps * step + validations * seconds)} in all"
            )
        progress_logger.info("%s", line)

    return report


def _summary(progress: Progress) -> dict[str, str | int | float | None]:
    return {
        "steps": progress.step,
        "best_step": progress.best_step,
        "best_score": progress.best_score,
        "skipped": progress.skipped,
    }


def read_curve(out: Path) -> list[dict[str, float]]:
    """Return the rows of the training curve that :func:`write_results` left in a folder."""
    lines = (out / CURVE).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def read_summary(out: Path) -> dict[str, float]:
    """Return the numbers of the summary that :func:`write_results` left in a folder."""
    summary = read_json(out / _SUMMARY)
    if not isinstance(summary, dict):
        raise ArtifactError(f"{out}/{_SUMMARY} must be a mapping", summary, "Train it again.")
    return {name: float(value) for name, value in summary.items() if isinstance(value, int | float)}


def write_results(
    out: Path, name: str, write: Callable[[Path], None], progress: Progress, **facts: str
) -> None:
    """Write what was trained into ``out/name``, then curve and summary; call it on rank 0 only."""
    target = out / name
    shutil.rmtree(target, ignore_errors=True)  # half-written by a killed attempt
    target.mkdir()
    write(target)
    lines = "".join(json.dumps(row, sort_keys=True) + "\n" for row in progress.curve)
    (out / CURVE).write_text(lines, encoding="utf-8")
    write_json(out / _SUMMARY, _summary(progress) | facts)
