"""Training jobs as they are launched: killed processes, Ray workers.

One tiny stage ``distill`` is built several ways; what is compared is the artifact's digest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from support.flow_runs import has_step
from support.kills import WorkerKiller
from support.sites import made
from support.token_artifacts import tokenized
from tasks.cluster.lease import ClusterLease
from tasks.run.stage import Artifact, Site
from tasks.stages.named import NamedBackbone
from tasks.stages.train import ModuleTraining, distill_stage
from umim_core.backbone.backbone import Backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.form import PAPER_FORM
from umim_core.config.recipe import ClusterConfig, DistillConfig
from umim_core.errors import ClusterError
from umim_core.rules.ruleset import RuleSet
from umim_core.training.train_job import read_curve

LENGTH, STEPS = 16, 40


@dataclass(frozen=True)
class Inputs:
    """What the stage is given."""

    training: ModuleTraining
    rules: Artifact
    tokens: Artifact

    def build(self, root: Path, lease: ClusterLease) -> Artifact:
        train, valid = (self.tokens.part(split) for split in ("train", "valid"))
        call = distill_stage(training=self.training, rules=self.rules, train=train, valid=valid)
        return call.build(Site(root, lease))


@pytest.fixture(scope="module")
def inputs(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Backbone, tiny_checkpoint: Path
) -> Inputs:
    folder, backbone = tmp_path_factory.mktemp("inputs"), tiny_checkpoint.parent / "backbone"
    spans = [(1, 2), (3, 4, 5), (6, 7)]
    rules = RuleSet.from_spans(spans, tokenizer_fingerprint=tiny_llama.tokenizer_fingerprint)
    rng, rows = np.random.default_rng(0), {"train": 14, "valid": 4}
    ids = {split: rng.integers(1, 8, n * LENGTH) for split, n in rows.items()}
    config = DistillConfig(
        max_steps=STEPS,
        batch_size=4,
        learning_rate=3e-3,  # low enough that the last validation is the best
        checkpoint_every=1,
        validate_every=10,
        patience=100,
        bf16=False,
    )
    return Inputs(
        ModuleTraining(NamedBackbone(str(backbone)), PAPER_FORM, config, LENGTH, seed=0),
        made(folder, "rules", lambda out: rules.save(out / "rules")),
        tokenized(folder, ids),
    )


@pytest.fixture(scope="module")
def in_process(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    root = tmp_path_factory.mktemp("in-process")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the processes have that it is compared with
    try:
        with ClusterLease(ClusterConfig(workers=0)) as lease:
            return inputs.build(root, lease)
    finally:
        torch.set_num_threads(threads)


def test_the_artifact_holds_checkpoint_curve_and_summary(in_process: Artifact) -> None:
    files = {path.name for path in in_process.path.iterdir()}
    assert files == {"checkpoint", "curve.jsonl", "summary.json", "manifest.json"}
    assert in_process.metrics["steps"] == STEPS
    curve = read_curve(in_process.path)
    assert [row["step"] for row in curve if "train_kl" in row] == list(range(1, STEPS + 1))
    losses = [row["valid_kl"] for row in curve if "valid_kl" in row]
    assert losses[-1] < losses[0]
    checkpoint = Checkpoint.load(in_process.path / "checkpoint")
    assert checkpoint.config.training["best_step"] == in_process.metrics["best_step"]


@pytest.fixture(scope="module")
def cluster(two_cores: None) -> Iterator[ClusterLease]:
    with ClusterLease(ClusterConfig(cpus=2, workers=2, max_restarts=1)) as lease:
        lease.ensure()
        yield lease


def lease_like(cluster: ClusterLease, **changes: object) -> ClusterLease:
    """Return a lease with other settings; it joins the cluster that already runs."""
    return ClusterLease(cluster.config.model_copy(update=changes))


def weights(artifact: Artifact) -> torch.Tensor:
    tensors = load_file(artifact.path / "checkpoint" / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def killing_a_worker(root: Path) -> WorkerKiller:
    """SIGKILL one training worker once five steps are saved."""
    return WorkerKiller("RayTrainWorker", ready=partial(has_step, root, 5))


def test_a_ray_worker_trains_to_the_digest_of_one_process(
    inputs: Inputs, cluster: ClusterLease, in_process: Artifact, tmp_path: Path
) -> None:
    with lease_like(cluster, workers=1) as lease:
        assert inputs.build(tmp_path, lease).digest == in_process.digest


@pytest.mark.full  # what two ranks sum is in the quick test_strategies.py
@pytest.mark.parametrize("strategy", ["ddp", "deepspeed"])
def test_two_ray_workers_train_to_the_weights_of_one_process(
    inputs: Inputs, cluster: ClusterLease, in_process: Artifact, tmp_path: Path, strategy: str
) -> None:
    with lease_like(cluster, strategy=strategy) as lease:
        artifact = inputs.build(tmp_path, lease)
    ours, theirs = read_curve(artifact.path), read_curve(in_process.path)
    for row, other in zip(ours, theirs, strict=True):
        assert row == pytest.approx(other, rel=1e-3)
    # Forty steps of AdamW enlarge the rounding of sums taken in another order.
    assert artifact.metrics["best_step"] == in_process.metrics["best_step"] == STEPS
    torch.testing.assert_close(weights(artifact), weights(in_process), atol=1e-3, rtol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "deepspeed"])
def test_ray_restarts_a_killed_worker_and_training_ends_with_the_same_digest(
    inputs: Inputs, cluster: ClusterLease, tmp_path: Path, strategy: str
) -> None:
    with lease_like(cluster, strategy=strategy) as lease:
        undisturbed = inputs.build(tmp_path / "undisturbed", lease)
        with killing_a_worker(tmp_path / "killed") as killer:
            killed = inputs.build(tmp_path / "killed", lease)
    assert killer.killed and killed.digest == undisturbed.digest


@pytest.mark.full
def test_a_worker_lost_too_often_is_a_cluster_error_and_the_rerun_resumes(
    inputs: Inputs, cluster: ClusterLease, in_process: Artifact, tmp_path: Path
) -> None:
    with lease_like(cluster, workers=1, max_restarts=0) as lease:
        lost = pytest.raises(ClusterError, match="workers may be lost at most 0 times")
        with killing_a_worker(tmp_path), lost:
            inputs.build(tmp_path, lease)
        assert inputs.build(tmp_path, lease).digest == in_process.digest
