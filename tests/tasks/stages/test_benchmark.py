"""Benchmarks in the comparison: batch size and prompt; data types of stages that measure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from support.sites import here, made
from support.token_artifacts import tokenized
from tasks.cluster.lease import ClusterLease
from tasks.report.compare import CellResult, comparison_rows
from tasks.run.site import Site
from tasks.run.stage import Artifact
from tasks.stages.evaluate import benchmark_stage, evaluate_stage, throughput_rows
from tasks.stages.named import NamedCheckpoint
from umim_core.config.evaluate import BenchmarkConfig, EvaluateConfig
from umim_core.config.recipe import BackboneDtype, Cell, ClusterConfig

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
    result = CellResult(
        Cell(backbone="tiny"),
        tokens,
        trained,
        settings={"WT": trained},
        evaluations={"WT": made(tmp_path, "evaluate")},
        benchmark=timed,
    )
    (row,) = comparison_rows([result], [], seed=0)
    expected = {
        f"{found.phase}_speedup": found.speedup
        for found in throughput_rows(timed)
        if (found.rules, found.prompt_tokens, found.batch_size) == ("natural", 24, 2)
    }
    for name in ("prefill_speedup", "decode_speedup"):
        assert row.metrics[name] == expected[name]
    assert len({found.speedup for found in throughput_rows(timed)}) > len(PROMPTS)


LENGTH = 16


def evaluated(root: Path, tokens: Artifact, merge: Path, dtype: BackboneDtype) -> Artifact:
    config = EvaluateConfig(alignment_rows=4, perplexity_rows=4, batch_size=2)
    call = evaluate_stage(
        tokens=tokens, checkpoint=NamedCheckpoint(merge), config=config, segment_length=LENGTH
    )
    return call.build(replace(here(root), dtype=dtype))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    rng = np.random.default_rng(0)
    splits = {split: rng.integers(1, 4, 8 * LENGTH) for split in ("train", "test")}
    return tokenized(tmp_path_factory.mktemp("tokens"), splits)


def test_what_is_measured_in_bfloat16_is_near_float32(
    tokens: Artifact, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    exact = evaluated(tmp_path, tokens, tiny_checkpoint, "float32").metrics
    rough = evaluated(tmp_path, tokens, tiny_checkpoint, "bfloat16").metrics
    for name in ("ppl_base", "ppl_umim", "cross_entropy"):
        assert rough[name] == pytest.approx(exact[name], rel=2e-2)
        assert rough[name] != exact[name]


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
    monkeypatch.setattr("tasks.run.site.machine_name", lambda threads: f"another, {threads}")
    assert here(tmp_path).machine.startswith("another")
    assert elsewhere == "host:1"
