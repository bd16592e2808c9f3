"""The backbone's data type in the stages that measure it, and what their keys say of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.token_artifacts import tokenized
from tasks.cluster.lease import ClusterLease
from tasks.run.stage import Artifact
from tasks.stages.benchmark import benchmark_stage
from tasks.stages.confidence import confidence_stage
from tasks.stages.evaluate import evaluate_stage
from umim_core.config.evaluate import BenchmarkConfig, EvaluateConfig
from umim_core.config.recipe import BackboneDtype, Cell, ClusterConfig, MiningConfig

LENGTH = 16
IN_PROCESS = ClusterLease(ClusterConfig(workers=0))
Stage = Callable[[Path, Artifact, Path, BackboneDtype], Artifact]


def evaluated(root: Path, made: Artifact, merge: Path, dtype: BackboneDtype) -> Artifact:
    config = EvaluateConfig(alignment_rows=4, perplexity_rows=4, batch_size=2)
    return evaluate_stage(root, IN_PROCESS, made, merge, config, LENGTH, "cpu", dtype)


def asked(root: Path, made: Artifact, merge: Path, dtype: BackboneDtype) -> Artifact:
    cell = Cell(backbone=str(merge.parent / "backbone"), source="confidence", min_probability=0.02)
    return confidence_stage(root, IN_PROCESS, made, cell, LENGTH, MiningConfig(), "cpu", dtype)


def timed(root: Path, made: Artifact, merge: Path, dtype: BackboneDtype) -> Artifact:
    config = BenchmarkConfig(prompt_lengths=(8,), new_tokens=2, warmup=0, pairs=1)
    return benchmark_stage(root, IN_PROCESS, made, merge, config, "cpu", dtype)


STAGES = pytest.mark.parametrize("stage", [evaluated, asked, timed])


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    rng = np.random.default_rng(0)
    splits = {split: rng.integers(1, 4, 8 * LENGTH) for split in ("train", "test")}
    return tokenized(tmp_path_factory.mktemp("tokens"), splits)


@STAGES
def test_another_data_type_is_another_result_and_float32_adds_nothing_to_a_key(
    stage: Stage, tokens: Artifact, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    exact = stage(tmp_path, tokens, tiny_checkpoint, "float32")
    rough = stage(tmp_path, tokens, tiny_checkpoint, "bfloat16")
    assert rough.executed and rough.key != exact.key
    assert rough.manifest()["config"]["dtype"] == "bfloat16"
    assert "dtype" not in exact.manifest()["config"]


def test_what_is_measured_in_bfloat16_is_near_float32(
    tokens: Artifact, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    exact = evaluated(tmp_path, tokens, tiny_checkpoint, "float32").metrics
    rough = evaluated(tmp_path, tokens, tiny_checkpoint, "bfloat16").metrics
    for name in ("ppl_base", "ppl_umim", "cross_entropy"):
        assert rough[name] == pytest.approx(exact[name], rel=2e-2)
        assert rough[name] != exact[name]
