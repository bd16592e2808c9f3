"""Training objectives: distillation of token rows, or preference over questions.

An objective is an ``nn.Module`` whose only parameters are those that it trains; its forward takes
the indices of a batch's items and returns sums, so that ranks with unequal rows normalise globally.

The preference (DPO) loss is that of answers which share one compressed context::

    s(x, y) = mean over t of log p(y_t | compressed x, y_<t)
    loss    = -log sigmoid(beta [(s - s_ref)(y+) - (s - s_ref)(y-)])

averaged over the wrong answers of a question, then over questions. Contexts and answers are packed
(see ``merging.continuations``): a question costs one row, not one per answer. At the start, where
the policy equals its reference, the loss is log 2 up to rounding: a question's scores differ in
their last bits where other questions share its batch. A step's true gain is small, so rounding must
be that of float32; in bfloat16 it is larger than the gain.

Source: paper, "RL Adaptation", equation task_rl_objective.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from umim_core.adaptation.choices import EncodedQuestion
from umim_core.config.model_base import Split
from umim_core.config.recipe import DistillConfig
from umim_core.merging.continuations import score_continuations
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.merging.packing import Segmentation
from umim_core.rules.matcher import Matcher, segment_parts
from umim_core.text.token_ids import spread_rows
from umim_core.training.loss import BatchLoss, summed_parts
from umim_core.training.step import DistillModel, anchor
from umim_core.training.token_rows import TokenRows
from umim_core.training.train_ranks import rank_and_world, sum_over_ranks

logger = logging.getLogger("umim.train")
_STREAM: Final = 0x6B696E64  # keeps these draws apart from those of the data order
_LEAST: Final = 16  # tokens of a row that is cut in two
PROMPT_STATES: Final = 96  # before a row's reply that have loss, at most


class TrainingRow(NamedTuple):
    """A row of a batch: raw ids [T], their units, and the raw positions [T] that count.

    Units that end at one of these ``states`` have loss, from the first merge on.
    """

    ids: NDArray[np.integer]
    cut: Segmentation
    states: NDArray[np.bool_]


def training_row(
    rows: TokenRows,
    index: int,
    matcher: Matcher,
    *,
    prompt: float = 0.0,
    copy: float = 0.0,
) -> TrainingRow:
    """Return a row of the kind that its index draws.

    Where rows have replies, all states of a reply have loss, and some before it, which the index
    draws.
    """
    ids = rows.row(index)
    if prompt + copy > 0.0 and rows.parts_of(index) == ((0, len(ids)),) and len(ids) >= _LEAST:
        draw = np.random.default_rng([_STREAM, index])
        share, size = draw.random(), len(ids)
        if share < copy:
            half = ids[: size // 2]
            twice = np.concatenate([half, half])
            cut = segment_parts(matcher.segment, twice, ((0, len(half)),))
            return TrainingRow(twice, cut, np.arange(len(twice)) >= len(half))
        if share < copy + prompt:
            start = int(draw.integers(size // 4, size - size // 4))
            cut = segment_parts(matcher.segment, ids, ((0, start),))
            return TrainingRow(ids, cut, np.arange(size) >= start)
    cut, states = rows.segment(index, matcher), np.ones(len(ids), dtype=np.bool_)
    if len(rows.replies):
        starts, lengths = cut
        first = int(np.argmax(lengths > 1)) if len(lengths) else 0
        ends = (starts + lengths - 1)[first:]
        before = ends[ends < rows.replies[index] - 1]  # the state there predicts the reply
        draw = np.random.default_rng([_STREAM, index])
        states[draw.permutation(before)[PROMPT_STATES:]] = False
    return TrainingRow(ids, cut, states)


class Objective(nn.Module, ABC):
    """What is trained, on what; calling it with training items gives a :class:`BatchLoss`.

    Attributes:
        module: What is trained.
        num_items: Training items; ``num_valid`` those of the validation.
        batch_size: Items that are measured at once.
        start: What :meth:`begin` measured; it is saved with every state and comes back with it.
    """

    metric_names: tuple[str, ...]  # of the sums of a validation
    weight_name: str  # of the unit that a batch's sums are divided by
    module: nn.Module
    num_items: int
    num_valid: int
    batch_size: int

    def __init__(self) -> None:
        super().__init__()
        self.start: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Measure what must be known of the start, before the first step of a run."""

    @abstractmethod
    def measured(self, indices: Sequence[int]) -> tuple[float, ...]:
        """Return weight and sums, in the order of ``metric_names``, of some validation items."""

    @abstractmethod
    def score(self, metrics: dict[str, float]) -> float:
        """Return the score that selects the best checkpoint; lower is better."""

    @torch.no_grad()
    def validation_sums(self, rank: int, world: int, limit: int) -> list[float]:
        """Return what ``measured`` gives of this rank's share of at most ``limit`` items."""
        sums = np.zeros(1 + len(self.metric_names))
        mine = spread_rows(self.num_valid, limit)[rank::world]
        for start in range(0, len(mine), self.batch_size):
            sums += self.measured(mine[start : start + self.batch_size])
        return [float(value) for value in sums]


class DistillObjective(Objective):
    """Predictive distillation over token rows."""

    metric_names = ("cross_entropy", "kl")
    weight_name = "aligned_rows"

    def __init__(
        self,
        merged_model: MergedModel,
        train: TokenRows,
        valid: TokenRows,
        config: DistillConfig,
        *,
        bf16: bool,
        batch_size: int,
    ) -> None:
        super().__init__()
        self._kinds = {"prompt": config.prompt_rows, "copy": config.copy_rows}
        self._model = DistillModel(merged_model, autocast=bf16, micro_batch=config.micro_batch)
        self._matcher = merged_model.require_matcher()
        self._train, self._valid = train, valid
        self.batch_size, self.num_items, self.num_valid = batch_size, len(train), len(valid)

    @property
    def module(self) -> MergeModule:  # type: ignore[override]  # registered once, by the model
        return self._model.module

    def forward(self, indices: Sequence[int]) -> BatchLoss:
        return self._loss(self._train, indices, self._kinds)

    def _loss(
        self, rows: TokenRows, indices: Sequence[int], kinds: Mapping[str, float]
    ) -> BatchLoss:
        batch = [training_row(rows, index, self._matcher, **kinds) for index in indices]
        loss: BatchLoss = self._model(
            [row.ids for row in batch], [row.cut for row in batch], [row.states for row in batch]
        )
        return loss

    def measured(self, indices: Sequence[int]) -> tuple[float, ...]:
        loss = self._loss(self._valid, indices, {})  # as rules merge
        return loss.weight, float(loss.total), float(loss.kl)

    def score(self, metrics: dict[str, float]) -> float:
        return metrics["cross_entropy"]


class PreferenceObjective(Objective):
    """Preference (DPO) over multiple-choice questions; the reference is the model at the start.

    Trained is ``module``, the merge module or the weights of a control, which ``merged_model``
    reads through. The reference has the questions alone that ``items`` names of each split, None
    for all. ``beta`` is the pull towards it. ``batch_size`` questions are scored at once outside of
    training steps, ``micro_batch`` everywhere; each micro-batch leaves its gradient and gives its
    activations back. None takes a step as a whole.
    """

    metric_names = ("loss", "accuracy")
    weight_name = "questions"

    def __init__(
        self,
        module: nn.Module,
        merged_model: MergedModel,
        train: list[EncodedQuestion],
        valid: list[EncodedQuestion],
        *,
        beta: float,
        batch_size: int,
        items: Mapping[Split, Sequence[int]] | None = None,
        micro_batch: int | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self._merged_model = merged_model
        self._questions: dict[Split, list[EncodedQuestion]] = {"train": train, "valid": valid}
        self._beta, self._micro_batch = beta, micro_batch
        self.batch_size = min(batch_size, micro_batch or batch_size)
        self.num_items, self.num_valid = len(train), len(valid)
        every = {split: range(len(questions)) for split, questions in self._questions.items()}
        self._scored = [(s, index) for s, indices in (items or every).items() for index in indices]
        ends = np.cumsum([len(self._questions[s][i].endings) for s, i in self._scored]).tolist()
        self._answers = dict(zip(self._scored, map(slice, [0, *ends], ends), strict=False))

    @torch.no_grad()
    def begin(self) -> None:
        """Score all answers of the questions in use [N] (nats a token); each rank scores its share.

        What one of them gets goes to all as numbers: they train against the same bits.
        """
        rank, world = rank_and_world()
        backbone, scores = self._merged_model.backbone, list[float]()
        logger.info("scoring %d questions of the start", len(self._scored))
        for number, first in enumerate(range(0, len(self._scored), self.batch_size)):
            of_batch = self._scored[first : first + self.batch_size]
            batch = [self._questions[split][index] for split, index in of_batch]
            if number % world == rank:
                scores += torch.cat(ending_scores(batch, self._merged_model)).tolist()
            else:
                scores += [0.0] * sum(len(question.endings) for question in batch)
        wide = torch.promote_types(backbone.dtype, torch.float32)
        scores = sum_over_ranks(scores)
        self.start = {"reference": torch.tensor(scores, dtype=wide, device=backbone.device)}

    def forward(self, indices: Sequence[int]) -> BatchLoss:
        if self._micro_batch is None:
            total = self._total(indices)
        else:
            starts = range(0, len(indices), self._micro_batch)
            parts = (indices[start : start + self._micro_batch] for start in starts)
            trained = [weight for weight in self.module.parameters() if weight.requires_grad]
            total = summed_parts(map(self._total, parts), trained)
        return BatchLoss(total, total.detach(), len(indices))

    def _total(self, indices: Sequence[int]) -> Tensor:
        loss, _ = self._loss("train", indices)
        total = loss * len(indices)
        if isinstance(self.module, MergeModule):  # contexts without merges do not reach it
            total = total + anchor(self.module)
        return total

    def _loss(self, split: Split, indices: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        questions = [self._questions[split][index] for index in indices]
        reference = [self.start["reference"][self._answers[split, index]] for index in indices]
        scores = ending_scores(questions, self._merged_model)
        golds = [question.gold for question in questions]
        return preference_loss(scores, reference, golds, beta=self._beta), scores

    def measured(self, indices: Sequence[int]) -> tuple[float, ...]:
        loss, scores = self._loss("valid", indices)
        golds = [self._questions["valid"][index].gold for index in indices]
        hits = sum(int(row.argmax()) == gold for row, gold in zip(scores, golds, strict=True))
        return float(len(indices)), float(loss) * len(indices), float(hits)

    def score(self, metrics: dict[str, float]) -> float:
        return -metrics["accuracy"] + 1e-6 * metrics["loss"]  # ties by loss


def ending_scores(questions: Sequence[EncodedQuestion], merged_model: MergedModel) -> list[Tensor]:
    """Score every answer given its question's compressed context.

    Per question, it is the mean token log-probability of each answer [C] (nats per token). Call it
    under ``torch.no_grad()`` with the reference module once per question; the scores then serve
    every epoch.
    """
    scored = score_continuations(
        [question.context for question in questions],
        [question.endings for question in questions],
        merged_model,
    )
    return [torch.stack([score.log_probs.mean() for score in row]) for row in scored]


def preference_loss(
    scores: Sequence[Tensor],
    reference: Sequence[Tensor],
    golds: Sequence[int],
    *,
    beta: float,
) -> Tensor:
    """Return the preference loss: mean over a question's wrong answers, then over questions.

    Scores of policy (with gradient) and frozen reference (without) are per question [C], ``golds``
    the indices of correct answers. ``beta``, above 0, pulls towards the reference.

    Example:
        Two answers, gold 0, s = (-1, -3), s_ref = (-1.5, -2.5), beta 1: the margin is
        0.5 - (-0.5) = 1 and the loss log(1 + e^-1) = 0.3133.
    """
    losses = []
    for policy, fixed, gold in zip(scores, reference, golds, strict=True):
        gain = policy - fixed.detach().to(policy)
        wrong = torch.arange(len(gain), device=gain.device) != gold
        losses.append(F.softplus(-beta * (gain[gold] - gain[wrong])).mean())
    return torch.stack(losses).mean()
