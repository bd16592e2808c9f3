"""Cells of the ladder: one row of it, trained from one seed and measured on the test rows.

A cell is found again by everything that decides it: what has the same module untrained shares its
measurement before the first step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from torch import Tensor

from benchmarks.common import Report, facts
from benchmarks.ladder.finished_cells import find_cell, keep_cell
from benchmarks.ladder.ladder_rows import LadderRow
from benchmarks.row_texts import RowText
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
from umim_core.rules.grams import ORDERS
from umim_core.rules.matcher import Matcher
from umim_core.rules.pruning import cut_to_budget
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
        saving: Share of layer-tokens that every row saves, by rules of its own out of these; None
            gives all rows all rules.
        train: Rows of training; each is read once.
        test: Rows that quality is measured on.
        config: Optimisation of all.
        batch_size: Rows per forward of a measurement.
    """

    backbone: Backbone
    rules: RuleSet
    saving: float | None
    train: RowText
    test: RowText
    config: DistillConfig
    batch_size: int

    def base_key(self) -> Report:
        """Return whatever decides the measurement of the base model."""
        return self._key("base", None) | {"rules": None}

    def untrained_key(self, row: LadderRow, seed: int) -> Report:
        """Return whatever decides the measurement of a row before its first step."""
        return self._key("untrained", seed) | self._form_key(row)

    def trained_key(self, row: LadderRow, seed: int) -> Report:
        """Return whatever decides the measurement of a trained row."""
        config = self._config(row).model_dump(mode="json")
        return self._key("trained", seed) | {
            **self._form_key(row),
            "train": self.train.facts()["digest"],
            "config": config,
        }

    def _form_key(self, row: LadderRow) -> Report:
        return {"form": row.form.form(), "rules": self.rules_of(row).digest}

    def rules_of(self, row: LadderRow) -> RuleSet:
        """Return the rules of a row, which save as much as every other row's do.

        k of L layers read every token, so TR (L - k) / L is saved: deeper rows merge more.
        """
        if self.saving is None:
            return self.rules
        layers = self.backbone.num_layers
        target = self.saving * layers / (layers - row.form.merge_depth)
        ids = np.concatenate(self.test.rows)
        borders = np.cumsum([0, *map(len, self.test.rows)])
        support = np.concatenate([self.rules.support_by_order[n] for n in ORDERS])
        return cut_to_budget(self.rules, -support.astype(np.float64), (ids, borders), target).rules

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
        return self.config.model_copy(update={**row.kinds, "row_rate": rate})

    def fresh(self, row: LadderRow, seed: int) -> Compressed:
        """Return the model that a row's training starts from."""
        rules, form = self.rules_of(row), row.form
        module = fresh_module(self.backbone, rules, form, seed)
        return Compressed(
            self.backbone,
            module,
            Matcher(rules),
            form.unit_positions,
            merge_depth=form.merge_depth,
        )

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
        """Train a row from one seed, to the last step, and measure it."""
        compressed, config = self.fresh(row, seed), self._config(row)
        rows = token_rows(self.train.rows)
        objective = DistillObjective(
            compressed,
            rows,
            rows.take(config.batch_size),  # the loop's choice of a best step is not asked for
            bf16=config.bf16,
            batch_size=config.batch_size,
            prompt_rows=config.prompt_rows,
            copy_rows=config.copy_rows,
        )
        strategy = LadderStrategy(objective, config)

        def report(progress: Progress, total: int) -> None:
            if progress.step % _SAY == 0:
                say(f"step {progress.step} of {total}")

        with TemporaryDirectory(prefix="umim-ladder-") as folder:
            state = Path(folder)
            result = train(objective, strategy, config, seed=seed, state_dir=state, on_step=report)
        curve = [step for step in result.progress.curve if "train_kl" in step]
        return {
            **self.measure(compressed),
            "steps": result.progress.step,
            "skipped": result.progress.skipped,
            "batches": strategy.digest(),
            "train_kl": [step["train_kl"] for step in curve],
            "seconds_per_step": median(strategy.seconds),
            "module_digest": compressed.require_module().digest(),
        }


def token_rows(rows: Sequence[np.ndarray]) -> TokenRows:
    """Return rows of raw ids as training reads them."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return TokenRows(np.concatenate(rows), np.concatenate([[0], lengths.cumsum()]), lengths)


def cell(folder: Path, key: Mapping[str, object], make: Callable[[], Report]) -> Report:
    """Return a finished cell; a missing one is measured and written at once."""
    found = find_cell(folder, key)
    return keep_cell(folder, key, make()) if found is None else found


class LadderStrategy(AdamWStrategy):
    """AdamW that keeps the seconds of each step and which training rows it read."""

    def __init__(self, objective: DistillObjective, config: DistillConfig) -> None:
        super().__init__(objective, config)
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
        norm = super().update(scaled, learning_rate)
        self.seconds.append(time.perf_counter() - self._began)
        return norm

    def digest(self) -> str:
        """Return the SHA-256 of the rows of every batch."""
        return sha256_bytes(canonical_json(self._batches).encode())
