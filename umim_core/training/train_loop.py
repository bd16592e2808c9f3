"""The training loop of merge modules (distillation, SFT, preference) and of small backbones.

It knows an objective (what), a strategy (how gradients are exchanged) and a state directory. The
data order is a function of (seed, position) alone, so a resumed run sees exactly the rows that the
undisturbed run sees; on CPU in float32 the curve and the weights are bit-identical.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umim_core.config.recipe import TrainConfig
from umim_core.errors import CorpusError, NumericalError, require
from umim_core.progress import duration, numbered
from umim_core.progress import logger as progress_logger
from umim_core.training.objectives import Objective
from umim_core.training.optimizer import Strategy, linear_warmup_decay
from umim_core.training.train_ranks import rank_and_world, sum_over_ranks
from umim_core.training.train_state import Progress, parameters_of, resume, save

logger = logging.getLogger("umim.train")
_LOWER_RATE: Final = "Lower the learning rate, or set bf16: false where the stage has it."


@dataclass(frozen=True)
class TrainResult:
    weights: dict[str, Tensor]
    progress: Progress


def train(
    objective: Objective,
    strategy: Strategy,
    config: TrainConfig,
    *,
    seed: int,
    state_dir: Path,
    on_step: Callable[[Progress, int], None] | None = None,
) -> TrainResult:
    """Train until the steps are used up or patience is lost, resuming where a state exists.

    ``config`` has the global batch size; ``seed`` decides the data order; ``state_dir`` is shared
    by all ranks. On rank 0 ``on_step`` is called after each step with the progress and the planned
    steps. The best weights are the same on every rank.
    """
    rule = "training needs at least one row"
    require(objective.num_items > 0, CorpusError, rule, 0, "Give more text or shorter rows.")
    most = config.max_epochs * objective.num_items
    epochs = numbered(config.max_epochs, "epoch")
    rule = f"a batch must be at most {numbered(most, 'row')}, {epochs} of them"
    remedy = "Lower the batch size, or give more text."
    require(config.batch_size <= most, CorpusError, rule, config.batch_size, remedy)
    total = planned_steps(config, objective.num_items)
    progress, best = resume(objective, strategy, state_dir)
    is_first, seconds = rank_and_world()[0] == 0, None
    if not progress.curve:
        objective.begin()
        began = time.perf_counter()
        _validate(objective, config, progress, best)
        seconds = time.perf_counter() - began
        if objective.start:  # it may have taken as long as an epoch
            save(objective, strategy, state_dir, progress, best)
    if is_first:
        _tell_plan(objective, config, total, progress.step, seconds)
    while not progress.finished:
        _step(objective, strategy, config, progress, seed, total)
        last = progress.step >= total
        if last or progress.step % config.validate_every == 0:
            _validate(objective, config, progress, best)
        progress.finished = last or progress.stale >= config.patience
        _require_merges(objective, config, progress)
        if progress.finished or progress.step % config.checkpoint_every == 0:
            save(objective, strategy, state_dir, progress, best)
        if on_step is not None and is_first:
            on_step(progress, total)
    rule, value = "the validation score must be finite at least once", f"{progress.step} steps"
    require(bool(best), NumericalError, rule, f"{value} without one", _LOWER_RATE)
    return TrainResult(best, progress)


def _tell_plan(
    objective: Objective, config: TrainConfig, total: int, done: int, seconds: float | None
) -> None:
    """Say before the first step what is planned, and the time that it will take.

    ``seconds`` are those of the first validation; None where a resumed run needs none. A step reads
    a batch by the base model and by UMIM, and goes back through the latter: one and a half times
    what the validation of as many rows takes. The later lines count what was measured.
    """
    if total < config.max_steps:
        read = f"{numbered(config.max_epochs, 'epoch')} of {numbered(objective.num_items, 'row')}"
        made, asked = numbered(total, "step"), f"{config.max_steps:,}"
        progress_logger.warning("%s: %s, fewer than the %s asked for", read, made, asked)
    steps = total - done
    validations = math.ceil(total / config.validate_every) - done // config.validate_every
    rows = min(objective.num_valid, config.validation_rows)
    line = (
        f"{numbered(steps, 'step')} of {numbered(config.batch_size, 'row')} and "
        f"{numbered(validations, 'validation')} of {numbered(rows, 'row')}"
    )
    if seconds is not None:
        step = 1.5 * seconds * config.batch_size / rows
        line += (
            f": about {step:.2g} s a step and {seconds:.2g} s a validation, "
            f"{duration(steps * step + validations * seconds)} in all"
        )
    progress_logger.info("%s", line)


def planned_steps(config: TrainConfig, num_items: int) -> int:
    """Return the optimiser steps of a run: the lesser of both limits."""
    return min(config.max_steps, max(1, config.max_epochs * num_items // config.batch_size))


def batch_indices(seed: int, step: int, batch_size: int, num_items: int) -> list[int]:
    """Return the items of one global batch: consecutive places in a chain of permutations."""
    indices: list[int] = []
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, place = divmod(position, num_items)
        indices.append(int(_permutation(seed, epoch, num_items)[place]))
    return indices


def planned_items(config: TrainConfig, seed: int, num_items: int) -> list[int]:
    """Return the items of all planned batches, in order: a short run asks for a few of many."""
    steps = range(planned_steps(config, num_items))
    batches = (batch_indices(seed, step, config.batch_size, num_items) for step in steps)
    return sorted({index for batch in batches for index in batch})


@lru_cache(maxsize=2)  # a batch touches two epochs at most, unless it is longer than one
def _permutation(seed: int, epoch: int, num_items: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_items)


def _step(
    objective: Objective,
    strategy: Strategy,
    config: TrainConfig,
    progress: Progress,
    seed: int,
    total: int,
) -> None:
    rank, world = rank_and_world()
    indices = batch_indices(seed, progress.step, config.batch_size, objective.num_items)
    loss = strategy.loss(indices[rank::world])
    bad = not bool(torch.isfinite(loss.total.detach()))
    shares = [float(loss.weight), float(bad), float(loss.total.detach()), float(loss.kl.detach())]
    weight, num_bad, loss_sum, kl_sum = sum_over_ranks(shares)
    rate = config.learning_rate * linear_warmup_decay(progress.step, total, config.warmup_fraction)
    progress.step += 1
    epoch = progress.step * config.batch_size / objective.num_items
    if not weight:  # no row of the global batch has a merge: there is nothing to learn from
        progress.curve.append({"step": progress.step, "epoch": epoch, objective.weight_name: 0.0})
        return
    norm = math.nan if num_bad else strategy.update(loss.total * (world / weight), rate)
    if not math.isfinite(norm):  # the weights were left alone
        progress.skipped += 1
        progress.curve.append({"step": progress.step, "skipped": 1.0})
        most = config.max_skipped_steps
        rule = f"at most {most} steps may have a loss or gradient that is not finite"
        require(progress.skipped <= most, NumericalError, rule, progress.skipped, _LOWER_RATE)
        return
    row = {
        "step": progress.step,
        "epoch": epoch,
        "train_loss": loss_sum / weight,
        "train_kl": kl_sum / weight,
        "grad_norm": norm,
        "learning_rate": rate,
        objective.weight_name: weight,
    }
    progress.curve.append(_finite(row))


def _require_merges(objective: Objective, config: TrainConfig, progress: Progress) -> None:
    """Refuse a run that has met no merge where one epoch, or the run, is over."""
    seen = min(progress.step * config.batch_size, objective.num_items)
    if seen == objective.num_items or progress.finished:
        met = progress.skipped or any(row.get(objective.weight_name) for row in progress.curve)
        rule, value = "training needs rows with at least one merge", f"none in {seen} rows"
        require(bool(met), CorpusError, rule, value, "Lower tau, or use other rules.")


def _finite(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if math.isfinite(value)}


def _validate(
    objective: Objective, config: TrainConfig, progress: Progress, best: dict[str, Tensor]
) -> None:
    rank, world = rank_and_world()
    share = objective.validation_sums(rank, world, config.validation_rows)
    weight, *sums = sum_over_ranks(share)
    rule = "validation needs rows with at least one merge"
    require(
        weight > 0, CorpusError, rule, "none", "Take more rules or longer rows, or give more text."
    )
    names = objective.metric_names
    metrics = {name: value / weight for name, value in zip(names, sums, strict=True)}
    row = {f"valid_{name}": value for name, value in metrics.items()}
    progress.curve.append(_finite({"step": progress.step} | row))
    score = objective.score(metrics)
    if math.isfinite(score) and (progress.best_score is None or score < progress.best_score):
        progress.best_score, progress.best_step, progress.stale = score, progress.step, 0
        best.clear()
        best.update({k: v.clone() for k, v in parameters_of(objective.module).items()})
    elif progress.step:
        progress.stale += 1
    logger.info("step %d: %s", progress.step, {k: round(v, 4) for k, v in metrics.items()})
