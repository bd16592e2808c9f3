"""Stages that measure and train: rows, data types, what a timing is of; a new form is one file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from support.sites import here, made
from support.token_artifacts import tokenized
from tasks.cluster.lease import ClusterLease
from tasks.report.comparison import Result, comparison_rows
from tasks.run.stage import Artifact, Metrics, Site
from tasks.stages.evaluate import benchmark_stage, evaluate_stage, rows_of, throughput_rows
from tasks.stages.named import NamedBackbone, NamedCheckpoint
from tasks.stages.train import ModuleTraining, distill_stage
from umim_core.backbone.backbone import Backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.evaluate import BenchmarkConfig, EvaluateConfig, Segments
from umim_core.config.form import PAPER_FORM, ModuleForm
from umim_core.config.recipe import BackboneDtype, Cell, ClusterConfig, DistillConfig
from umim_core.rules.ruleset import RuleSet
from umim_core.training.token_rows import TokenRows

LENGTH, ROWS = 16, 4


def text(seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(1, 9, ROWS * LENGTH).astype(np.int32)


def evaluated(
    root: Path,
    texts: dict[str, NDArray[np.int32]],
    checkpoint: Path,
    dtype: BackboneDtype = "float32",
) -> Metrics:
    call = evaluate_stage(
        tokens=tokenized(root, texts),
        checkpoint=NamedCheckpoint(checkpoint),
        config=EvaluateConfig(alignment_rows=ROWS, perplexity_rows=2 * ROWS, batch_size=ROWS),
        segment_length=LENGTH,
    )
    return call.build(replace(here(root), dtype=dtype)).metrics


def test_texts_out_of_domain_and_parts_are_measured_on_their_own_text(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    near, far = text(0), text(1)
    texts = {"test": near, "ood_far": far, "part_notes": far}
    every = evaluated(tmp_path, texts, tiny_checkpoint)
    alone = evaluated(tmp_path, {"test": far}, tiny_checkpoint)
    for name in ("ppl_base", "ppl_umim"):
        assert every[f"{name}_ood_far"] == alone[name] != every[name]
    for name in ("ppl_base", "ppl_umim", "top1", "kl", "token_reduction", "spans_per_row"):
        assert every[f"{name}_part_notes"] == alone[name]
    assert every["kl"] != every["kl_part_notes"]
    assert every["alignment_rows"] == every["perplexity_rows_ood_far"] == ROWS
    rough = evaluated(tmp_path, {"test": far}, tiny_checkpoint, "bfloat16")
    for name in ("ppl_base", "ppl_umim", "cross_entropy"):
        assert rough[name] == pytest.approx(alone[name], rel=2e-2)
        assert rough[name] != alone[name]


@pytest.mark.parametrize(("segments", "expected"), [("first", [0, 1, 2]), ("spread", [0, 3, 6])])
def test_rows_are_the_first_or_lie_at_even_distances(
    tmp_path: Path, segments: Segments, expected: list[int]
) -> None:
    rows = rows_of(tokenized(tmp_path, {"test": np.arange(40)}), "test", 4, 3, segments)
    assert [int(row[0]) // 4 for row in rows] == expected


def test_training_and_validation_rows_are_those_of_their_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {"train": text(0), "valid": text(1), "test": text(2)}
    tokens = tokenized(tmp_path, texts)
    config = DistillConfig(max_steps=1, batch_size=1)
    training = ModuleTraining(NamedBackbone("none"), PAPER_FORM, config, LENGTH, seed=0)
    parts = {split: tokens.part(split) for split in ("train", "valid")}
    monkeypatch.setattr("tasks.stages.train.launch", lambda job, lease: job)
    site = here(tmp_path)
    job: Any = distill_stage.body(tmp_path, site, training=training, rules=tokens, **parts)
    for split in parts:
        rows = TokenRows.load(Path(getattr(job, split)), job.max_tokens)
        found = [rows.row(i).tolist() for i in range(len(rows))]
        assert found == texts[split].reshape(ROWS, LENGTH).tolist()


PROMPTS, BATCHES = (8, 24, 16), (2, 1)


def test_the_comparison_shows_the_longest_prompt_at_the_first_batch_size(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    tokens = tokenized(tmp_path, {"test": np.arange(400) % 9 + 1})
    config = BenchmarkConfig(
        prompt_lengths=PROMPTS, batch_sizes=BATCHES, new_tokens=2, warmup=0, pairs=1
    )
    checkpoint = NamedCheckpoint(tiny_checkpoint)
    call = benchmark_stage(tokens=tokens, checkpoint=checkpoint, config=config)
    timed = call.build(here(tmp_path))
    place = json.loads((timed.path / "machine.json").read_text("utf-8"))
    assert place == timed.manifest()["config"]["machine"]
    assert place.endswith(f", {torch.get_num_threads()} threads")
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "checkpoint").symlink_to(tiny_checkpoint)
    trained = Artifact("distill", "", tmp_path / "trained", "", executed=True)
    result = Result(
        Cell(backbone="tiny"),
        tokens,
        trained,
        settings={"WT": trained},
        evaluations={"WT": made(tmp_path, "evaluate")},
        benchmark=timed,
    )
    (row,) = comparison_rows([result], seed=0)
    rows = throughput_rows(timed)
    expected = {
        f"{found.phase}_speedup": found.speedup
        for found in rows
        if (found.rules, found.prompt_tokens, found.batch_size) == ("natural", 24, 2)
    }
    for name in ("prefill_speedup", "decode_speedup"):
        assert row.metrics[name] == expected[name]
    assert len({found.speedup for found in rows}) > len(PROMPTS)


def test_a_timing_is_of_a_machine_and_of_the_threads_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = ClusterLease(ClusterConfig(workers=2, cpus=3))
    elsewhere = Site(tmp_path, ClusterLease(ClusterConfig(workers=2, address="host:1"))).machine
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert here(tmp_path).machine == Site(tmp_path, workers).machine
        torch.set_num_threads(1)
        assert here(tmp_path).machine != Site(tmp_path, workers).machine
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr("tasks.run.stage.machine_name", lambda threads: f"another, {threads}")
    assert here(tmp_path).machine.startswith("another")
    assert elsewhere == "host:1"


def test_a_form_goes_down_to_its_comparison_row(
    tiny_llama: Backbone, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    fingerprint = tiny_llama.tokenizer_fingerprint
    mined = RuleSet.from_spans([(1, 2), (3, 4, 5)], tokenizer_fingerprint=fingerprint)

    sizes = {"train": 8, "valid": 2, "test": 4}
    tokens = tokenized(tmp_path, {s: np.arange(n * LENGTH) % 7 + 1 for s, n in sizes.items()})
    filtered = made(tmp_path, "rules", lambda out: mined.save(out / "rules"))
    form = {"kind": "linear", "unit_positions": "preserved"}
    cell = Cell(backbone=str(tiny_checkpoint.parent / "backbone"), **form)
    config = DistillConfig(max_steps=4, batch_size=4, bf16=False)
    train, valid = tokens.part("train"), tokens.part("valid")
    training = ModuleTraining(NamedBackbone(cell.backbone), cell.alone(), config, LENGTH, seed=0)
    distilled = distill_stage(training=training, rules=filtered, train=train, valid=valid).build(
        here(tmp_path)
    )
    evaluated = evaluate_stage(
        tokens=tokens,
        checkpoint=NamedCheckpoint(distilled.path / "checkpoint"),
        config=EvaluateConfig(alignment_rows=4, perplexity_rows=4, batch_size=2),
        segment_length=LENGTH,
    ).build(here(tmp_path))
    made_of = Checkpoint.load(distilled.path / "checkpoint")
    assert type(made_of.module).__name__ == "LinearMerge"
    assert made_of.config.form() == cell.form() == ModuleForm().form() | form
    result = Result(cell, tokens, filtered)
    result.settings["WT"], result.evaluations["WT"] = distilled, evaluated
    [row] = comparison_rows([result], seed=17)
    assert row.kind == "linear"
    assert "linear" in row.label
    assert row.metrics["rules"] == 2.0
    assert row.metrics["kl"] is not None and row.metrics["kl"] > 0.0
