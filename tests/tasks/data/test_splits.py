"""Splits that stages read: training rows, validation rows, text in and out of domain."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from support.sites import here
from support.token_artifacts import tokenized
from tasks.cluster.lease import ClusterLease
from tasks.run.stage import Metrics
from tasks.stages.evaluate import evaluate_stage, rows_of
from tasks.stages.named import NamedBackbone, NamedCheckpoint
from tasks.stages.train import ModuleTraining, distill_stage
from tasks.training.train_worker import launch
from umim_core.config.evaluate import EvaluateConfig, Segments
from umim_core.config.form import PAPER_FORM
from umim_core.config.recipe import DistillConfig
from umim_core.errors import BackboneError
from umim_core.training.token_rows import TokenRows
from umim_core.training.train_job import TrainJob

LENGTH, ROWS = 16, 4


def text(seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(1, 9, ROWS * LENGTH).astype(np.int32)


def evaluated(
    root: Path, texts: dict[str, NDArray[np.int32]], checkpoint: Path, config: EvaluateConfig
) -> Metrics:
    call = evaluate_stage(
        tokens=tokenized(root, texts),
        checkpoint=NamedCheckpoint(checkpoint),
        config=config,
        segment_length=LENGTH,
    )
    return call.build(here(root)).metrics


def test_perplexity_out_of_domain_is_that_of_the_text_out_of_domain(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    config = EvaluateConfig(alignment_rows=2, perplexity_rows=ROWS, batch_size=ROWS)
    near, far = text(0), text(1)
    both, alone = (
        evaluated(tmp_path, texts, tiny_checkpoint, config)
        for texts in ({"test": near, "ood_far": far}, {"test": far})
    )
    for name in ("ppl_base", "ppl_umim"):
        assert both[f"{name}_ood_far"] == alone[name] != both[name]


def test_a_part_is_measured_on_its_own_text(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = EvaluateConfig(alignment_rows=ROWS, perplexity_rows=ROWS, batch_size=ROWS)
    both, alone = (
        evaluated(tmp_path, texts, tiny_checkpoint, config)
        for texts in ({"test": text(0), "part_notes": text(1)}, {"test": text(1)})
    )
    for name in ("ppl_base", "ppl_umim", "top1", "kl", "token_reduction", "spans_per_row"):
        assert both[f"{name}_part_notes"] == alone[name]
    assert both["kl"] != both["kl_part_notes"]


@pytest.mark.parametrize(("segments", "expected"), [("first", [0, 1, 2]), ("spread", [0, 3, 6])])
def test_rows_are_the_first_or_lie_at_even_distances(
    tmp_path: Path, segments: Segments, expected: list[int]
) -> None:
    rows = rows_of(tokenized(tmp_path, {"test": np.arange(40)}), "test", 4, 3, segments)
    assert [int(row[0]) // 4 for row in rows] == expected


def test_training_and_validation_rows_are_those_of_their_splits(
    tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_tokenizer.save_pretrained(tmp_path / "backbone")  # no weights: training cannot start
    texts = {"train": text(0), "valid": text(1), "test": text(2)}
    made = tokenized(tmp_path, texts)
    jobs: list[TrainJob] = []

    def launched(job: TrainJob, lease: ClusterLease) -> dict[str, float]:
        jobs.append(job)
        return launch(job, lease)

    monkeypatch.setattr("tasks.stages.train.launch", launched)
    training = ModuleTraining(
        NamedBackbone(str(tmp_path / "backbone")), PAPER_FORM,
        DistillConfig(max_steps=1, batch_size=1), LENGTH, seed=0,
    )  # fmt: skip
    train, valid = made.part("train"), made.part("valid")
    with pytest.raises(BackboneError):
        distill_stage.body(
            tmp_path, here(tmp_path), training=training, rules=made, train=train, valid=valid
        )
    for split in ("train", "valid"):
        rows = TokenRows.load(Path(getattr(jobs[0], split)), jobs[0].max_tokens)
        assert [rows.row(i).tolist() for i in range(len(rows))] == (
            texts[split].reshape(ROWS, LENGTH).tolist()
        )
