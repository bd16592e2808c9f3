"""The backbone's data type in a stage that measures it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.token_artifacts import tokenized
from tasks.cluster.lease import ClusterLease
from tasks.run.stage import Artifact
from tasks.stages.evaluate import evaluate_stage
from umim_core.config.evaluate import EvaluateConfig
from umim_core.config.recipe import BackboneDtype, ClusterConfig

LENGTH = 16
IN_PROCESS = ClusterLease(ClusterConfig(workers=0))


def evaluated(root: Path, made: Artifact, merge: Path, dtype: BackboneDtype) -> Artifact:
    config = EvaluateConfig(alignment_rows=4, perplexity_rows=4, batch_size=2)
    return evaluate_stage(root, IN_PROCESS, made, merge, config, LENGTH, "cpu", dtype)


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
