"""Trainings so small that forty steps take a second, built the same in every process."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from support.tiny_models import random_backbone
from tasks.training.strategies import make_strategy
from umim_core.adaptation.choices import EncodedQuestion
from umim_core.config.recipe import DistillConfig, TrainConfig
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.merging.rule_rows import RuleRows, frequent_spans
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.training.loss import BatchLoss
from umim_core.training.objectives import DistillObjective, PreferenceObjective, ending_scores
from umim_core.training.token_rows import TokenRows
from umim_core.training.train_loop import TrainResult, train
from umim_core.training.train_state import Progress

SEED, VOCAB, HIDDEN, WIDTH, ROWS = 3, 32, 16, 24, 15
CONFIG = TrainConfig(
    max_steps=12,
    batch_size=6,
    learning_rate=1e-2,
    weight_decay=0.1,
    clip_norm=0.5,  # below the gradient norms of these rows, so that clipping is seen
    validate_every=4,
    checkpoint_every=3,
    patience=100,
)
SPANS = [(1, 2), (3, 4, 5)]


def rows(merges: Sequence[bool]) -> TokenRows:
    """Random rows with 4 or 20 aligned predictions, none unless a rule may match (``merges``)."""
    ids = np.random.default_rng(SEED).integers(8, VOCAB - 1, (len(merges), WIDTH))
    for index, row in enumerate(ids):
        place = 3 if index % 2 else 19
        row[place : place + 2] = (1, 2)
    return TokenRows.of_rows(ids.tolist(), [WIDTH if may else 0 for may in merges])


@dataclass(frozen=True)
class Kill:
    """A signal to the own process, some seconds after the forward pass of a batch, from 1."""

    rank: int
    batch: int
    seconds: float = 0.0
    signal: signal.Signals = signal.SIGKILL


def questions(count: int, seed: int) -> list[EncodedQuestion]:
    """Random questions of three answers, in whose contexts the rule (1, 2) matches."""
    draws = partial(np.random.default_rng(seed).integers, 8, VOCAB - 1)
    found = []
    for index in range(count):
        context = np.concatenate([draws(5), (1, 2), draws(2)])
        endings = tuple(draws(2 + choice) for choice in range(3))
        found.append(EncodedQuestion(context, endings, index % 3))
    return found


QUESTIONS = questions(4, seed=3)


def scores(merged_model: MergedModel) -> Tensor:
    """Return the scores [4, 3] of the answers to four questions."""
    with torch.no_grad():
        return torch.stack(ending_scores(QUESTIONS, merged_model))


def disturb(module: nn.Module) -> None:
    """Move the weights away from a start."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


class _Watching(nn.Module):
    """Objective that counts its batches, and dies at one of them or has faults, if it is asked to.

    Attributes:
        fault: What is not finite in some batches: the loss ("nan", "inf"), the "gradient" alone.
        faulty: Numbers of those batches, from 1.
    """

    kill: Kill | None = None
    fault = ""
    faulty: Sequence[int] = ()
    batches = 0

    def forward(self, indices: Sequence[int]) -> BatchLoss:
        loss: BatchLoss = super().forward(indices)
        self.batches += 1
        if self.kill is not None and self.batches == self.kill.batch:
            order = (os.getpid(), self.kill.signal)
            threading.Timer(self.kill.seconds, os.kill, order).start()
        if self.batches not in self.faulty:
            return loss
        if self.fault == "gradient":
            return loss._replace(total=loss.total + (self.module.query * 0.0).sqrt().sum())
        return loss._replace(total=loss.total * float(self.fault))


class Watched(_Watching, DistillObjective): ...


class WatchedPreference(_Watching, PreferenceObjective): ...


@dataclass(frozen=True)
class Run:
    """One training run, of rows or of questions; equal runs take equal steps.

    ``folder`` receives the states. Rules may match in the rows that ``merges`` names, and in the
    validation rows that ``valid`` names. The first loss is NaN on the rank ``poisoned``.
    """

    folder: Path
    strategy: Literal["ddp", "deepspeed"] = "ddp"
    config: TrainConfig = CONFIG
    merges: tuple[bool, ...] = (True,) * ROWS
    valid: tuple[bool, ...] = (True,) * 4
    kills: tuple[Kill, ...] = ()
    rule_rows: int = 0
    preference: bool = False
    poisoned: int | None = None

    def objective(self) -> Watched | WatchedPreference:
        """Return fresh weights over the rows, or the questions, of this run."""
        sizes = {"vocab_size": VOCAB, "max_position_embeddings": WIDTH}
        backbone = random_backbone("llama", torch.float32, seed=SEED, eos_token_id=0, **sizes)
        module = MergeModule(HIDDEN)
        module.initialise(0.3, torch.Generator().manual_seed(SEED))
        matcher = Matcher(RuleSet.from_spans(SPANS))
        if self.rule_rows:
            module.rows = RuleRows(frequent_spans(matcher.rules, self.rule_rows), HIDDEN)
        merged_model = MergedModel(backbone, module, matcher)
        if self.preference:
            return WatchedPreference(
                module,
                merged_model,
                questions(ROWS, 0),
                questions(4, 1),
                beta=5.0,  # gradients as large as those of a distillation
                batch_size=2,
            )
        return Watched(
            merged_model,
            rows(self.merges),
            rows(self.valid),
            DistillConfig(max_steps=1),
            bf16=False,
            batch_size=self.config.batch_size,
        )

    def final(self) -> Mapping[str, bytes]:
        """Return the files of the last state: weights, optimiser, random state, curve."""
        folder = self.folder / f"step-{self.config.max_steps:08d}"
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def train_rank(rank: int, run: Run) -> None:
    """Train on one rank, resuming; what happens is logged to stderr."""
    logging.basicConfig(level=logging.INFO)
    train_here(run, rank)


def train_here(run: Run, rank: int = 0) -> tuple[TrainResult, Watched | WatchedPreference]:
    """Train in this process, as that rank of the group if there is one."""
    objective = run.objective()
    objective.kill = next((kill for kill in run.kills if kill.rank == rank), None)
    if rank == run.poisoned:
        objective.fault, objective.faulty = "nan", (1,)
    strategy = make_strategy(run.strategy, objective, run.config)
    return train(objective, strategy, run.config, seed=SEED, state_dir=run.folder), objective


class Stopped(Exception):
    """Ends a run from outside."""


def train_until(run: Run, last: int) -> None:
    """Train in this process and end the run from outside right after a step."""

    def stop(progress: Progress, total: int) -> None:
        if progress.step == last:
            raise Stopped

    goal = run.objective()
    strategy = make_strategy("ddp", goal, run.config)
    with contextlib.suppress(Stopped):
        train(goal, strategy, run.config, seed=SEED, state_dir=run.folder, on_step=stop)
        raise AssertionError(f"the run ended before step {last}")
