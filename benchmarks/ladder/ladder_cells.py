"""Cells of the ladder: one row of it, trained from one seed and measured on the test rows.

A cell is found again by everything that decides it: what has the same module untrained shares its
measurement before the first step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common import Report, facts
from benchmarks.finished_cells import find_cell, keep_cell
from benchmarks.ladder.ladder_rows import LadderRow
from benchmarks.ladder.unfrozen_blocks import UnfrozenObjective, with_trained_blocks
from benchmarks.token_reduction.row_texts import RowText
from umim_core.backbone.backbone import Backbone
from umim_core.checkpoint.untrained import fresh_module
from umim_core.config.recipe import DistillConfig
from umim_core.distill.objectives import BatchLoss, DistillObjective
from umim_core.distill.optimizer import AdamWStrategy
from umim_core.distill.token_rows import TokenRows
from umim_core.distill.train_loop import train
from umim_core.distill.train_state import Progress
from umim_core.evaluation.alignment import evaluate_alignment
from umim_core.evaluation.perplexity import perplexity
from umim_core.merging.compressed import Compressed
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import canonical_json, sha256_bytes

LIBRARIES: Final = ("numpy", "torch", "transformers")
ALIGNED: Final = ("kl", "top1")  # metrics of aligned rows
_SAY: Final = 10  # steps between two lines of progress


@dataclass(frozen=True)
class Subject:
    """Backbone, rules, texts and budget, which all cells have in common.

    Attributes:
        backbone: The frozen model, which is the teacher of all.
        rules: The rules of all.
        train: Rows of training; each is read once.
        test: Rows that quality is measured on.
        config: Optimisation of all, without hidden-state terms.
        block_rate: Learning rate of the control's blocks over the others'.
        batch_size: Rows per forward of a measurement.
    """

    backbone: Backbone
    rules: RuleSet
    train: RowText
    test: RowText
    config: DistillConfig
    block_rate: float
    batch_size: int

    def base_key(self) -> Report:
        """Return whatever decides the measurement of the base model."""
        return self._key("base", None) | {"rules": None}

    def untrained_key(self, row: LadderRow, seed: int) -> Report:
        """Return whatever decides the measurement of a row before its first step."""
        return self._key("untrained", seed) | {"form": row.form.form()}

    def trained_key(self, row: LadderRow, seed: int) -> Report:
        """Return whatever decides the measurement of a trained row."""
        config = self._config(row).model_dump(mode="json")
        return self._key("trained", seed) | {
            "form": row.form.form(),
            "blocks": list(row.blocks),
            "block_rate": self.block_rate if row.blocks else None,
            "train": self.train.facts()["digest"],
            "config": config,
        }

    def _key(self, cell: str, seed: int | None) -> Report:
        return {
            "cell": cell,
            "seed": seed,
            "backbone": self.backbone.fingerprint,
            "tokenizer": self.backbone.tokenizer_fingerprint,
            "rules": self.rules.digest,
            "test": self.test.facts()["digest"],
            "batch_size": self.batch_size,
            "versions": facts(LIBRARIES, None)["versions"],
        }

    def _config(self, row: LadderRow) -> DistillConfig:
        """Return the optimisation of a row; one without rule rows has no rate of theirs."""
        rate = self.config.row_rate if row.form.rule_rows else 1.0
        return self.config.model_copy(update={"hidden_terms": row.terms, "row_rate": rate})

    def fresh(self, row: LadderRow, seed: int) -> Compressed:
        """Return the model that a row's training starts from."""
        module = fresh_module(self.backbone, self.rules, row.form, seed)
        return Compressed(self.backbone, module, Matcher(self.rules), row.form.unit_positions)

    def measure_base(self) -> Report:
        """Measure the base model: nats of each test row."""
        read = perplexity(
            self.test.rows, Compressed.without_merging(self.backbone), self.batch_size
        )
        return {
            "ppl": read.ppl,
            "row_nats": list(read.row_sums),
            "row_targets": list(read.row_targets),
        }

    def measure(self, compressed: Compressed) -> Report:
        """Measure a model against the frozen backbone; sums are those of each test row."""
        rows = self.test.rows
        aligned = evaluate_alignment(rows, compressed, self.batch_size, base=self.backbone)
        read = perplexity(rows, compressed, self.batch_size)
        return {
            **{name: aligned.means[name] for name in ALIGNED},
            "ppl": read.ppl,
            "token_reduction": aligned.token_reduction,
            "row_sums": {name: list(aligned.row_sums[name]) for name in ALIGNED},
            "row_counts": list(aligned.row_counts),
            "row_nats": list(read.row_sums),
            "row_targets": list(read.row_targets),
        }

    def train_and_measure(self, row: LadderRow, seed: int, say: Callable[[str], None]) -> Report:
        """Train a row from one seed, to the last step, and measure it.

        Args:
            row: The row.
            seed: Of weights and data order.
            say: Called with lines of progress.
        """
        compressed, config = self.fresh(row, seed), self._config(row)
        objective, student = self._objective(row, compressed, config)
        blocks = [weight for weight in student.model.parameters() if weight.requires_grad]
        strategy = LadderStrategy(objective, config, blocks, self.block_rate)

        def report(progress: Progress, total: int) -> None:
            if progress.step % _SAY == 0:
                say(f"step {progress.step} of {total}")

        with TemporaryDirectory(prefix="umim-ladder-") as folder:
            state = Path(folder)
            result = train(objective, strategy, config, seed=seed, state_dir=state, on_step=report)
        curve = [step for step in result.progress.curve if "train_kl" in step]
        return {
            **self.measure(replace(compressed, backbone=student)),
            "steps": result.progress.step,
            "skipped": result.progress.skipped,
            "batches": strategy.digest(),
            "train_kl": [step["train_kl"] for step in curve],
            "seconds_per_step": median(strategy.seconds),
            "module_digest": compressed.require_module().digest(),
        }

    def _objective(
        self, row: LadderRow, compressed: Compressed, config: DistillConfig
    ) -> tuple[DistillObjective, Backbone]:
        """Return what a row minimises, and the backbone that reads units in the end.

        The loop's own validation reads one batch of training rows: its choice of a best step is
        not asked for.
        """
        rows = token_rows(self.train.rows)
        valid = rows.take(config.batch_size)
        size, terms = config.batch_size, config.hidden_terms
        if not row.blocks:
            objective = DistillObjective(
                compressed, rows, valid, bf16=config.bf16, batch_size=size, hidden_terms=terms
            )
            return objective, compressed.backbone
        student = with_trained_blocks(compressed.backbone, row.blocks)
        control = UnfrozenObjective(
            compressed, student, rows, valid, bf16=config.bf16, batch_size=size, hidden_terms=terms
        )
        return control, student


def token_rows(rows: Sequence[np.ndarray]) -> TokenRows:
    """Return rows of raw ids as training reads them."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return TokenRows(np.concatenate(rows), np.concatenate([[0], lengths.cumsum()]), lengths)


def cell(folder: Path, key: Mapping[str, object], make: Callable[[], Report]) -> Report:
    """Return a finished cell; a missing one is measured and written at once."""
    found = find_cell(folder, key)
    return keep_cell(folder, key, make()) if found is None else found


class LadderStrategy(AdamWStrategy):
    """AdamW that keeps the seconds of each step and which training rows it read.

    A step of the control's blocks is cut to a share of its length. AdamW's moments do not depend on
    the weights, so that is its step at a share of the learning rate.

    Args:
        objective: What is trained.
        config: Learning rate, decay and clipping.
        blocks: Weights of the control's blocks; none in other rows.
        block_rate: Their learning rate over the others'.
    """

    def __init__(
        self,
        objective: DistillObjective,
        config: DistillConfig,
        blocks: Sequence[nn.Parameter],
        block_rate: float,
    ) -> None:
        super().__init__(objective, config)
        self._blocks, self._block_rate = blocks, block_rate
        self.seconds: list[float] = []
        self._batches: list[list[int]] = []
        self._began = 0.0

    def loss(self, indices: Sequence[int]) -> BatchLoss:
        """Run the objective."""
        self._batches.append(list(indices))
        self._began = time.perf_counter()
        return super().loss(indices)

    def update(self, scaled: Tensor, learning_rate: float) -> float:
        """Back-propagate, clip, step."""
        before = [weight.detach().clone() for weight in self._blocks]
        norm = super().update(scaled, learning_rate)
        with torch.no_grad():
            for weight, old in zip(self._blocks, before, strict=True):
                weight.copy_(old.lerp(weight, self._block_rate))
        self.seconds.append(time.perf_counter() - self._began)
        return norm

    def digest(self) -> str:
        """Return the SHA-256 of the rows of every batch."""
        return sha256_bytes(canonical_json(self._batches).encode())
