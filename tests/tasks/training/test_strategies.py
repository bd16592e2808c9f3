"""Two real processes over gloo: gradients of DDP and ZeRO-2 against the joint batch, and resume.

Every rank runs ``run_worker``, the function that Ray Train runs; what a rank leaves in its resume
state (weights, AdamW moments) is what is compared. After AdamW's first step ``exp_avg`` is
(1 - beta_1) = 0.1 times the clipped gradient. Tolerances: the sum over a batch's rows is taken in
another order, so single-precision rounding is all that may differ.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from support.merge_modules import give_rows
from support.merged_models import fresh_model
from support.tiny_jobs import tiny_job, train_jobs
from support.training_processes import run_ranks
from tasks.training.train_worker import run_worker
from umim_core.backbone.backbone import load_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.recipe import DistillConfig
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.training.objectives import DistillObjective
from umim_core.training.token_rows import TokenRows
from umim_core.training.train_job import TrainJob
from umim_core.training.train_loop import batch_indices

ROWS, WIDTH, SEED = 12, 24, 0
POISON = 30  # its embedding is NaN here; no id that the probe of backbones tries
STRATEGIES = ("ddp", "deepspeed")
KINDS = ("rows", "one-sided", "poisoned")
CONFIG = DistillConfig(
    max_steps=2,
    batch_size=4,
    learning_rate=1e-2,
    clip_norm=0.5,  # below the gradient norms of this job, so that clipping is seen
    weight_decay=0.1,
    checkpoint_every=1,
    bf16=False,
)


def token_rows() -> list[list[int]]:
    """Rows with 3 or 20 aligned predictions, so that a mean of ranks' means is visibly wrong."""
    rng = np.random.default_rng(SEED)
    rows = rng.integers(8, POISON, (ROWS, WIDTH))  # no rule matches ids from 8 on
    for index, row in enumerate(rows):
        place = 4 if index in batch_indices(SEED, 0, 4, ROWS)[::2] else 20
        row[place : place + 2] = (1, 2)
    return [[int(token) for token in row] for row in rows]


@pytest.fixture(scope="module")
def job(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Callable[[str, int], PreTrainedModel],
    tiny_tokenizer: PreTrainedTokenizerBase,
) -> TrainJob:
    folder = tmp_path_factory.mktemp("job")
    model = tiny_model("llama", 0)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    model.save_pretrained(folder / "backbone")
    tiny_tokenizer.save_pretrained(folder / "backbone")
    backbone = load_backbone(str(folder / "backbone"))
    spans = [(1, 2), (3, 4, 5), (6, 7)]
    rules = RuleSet.from_spans(spans, backbone.tokenizer_fingerprint)
    rules.save(folder / "rules")
    start = fresh_model(backbone, rules, 0.3, SEED)
    Checkpoint.of(start).save(folder / "start")
    give_rows(start.require_module(), spans[:2])
    Checkpoint.of(start).save(folder / "rowed")
    rows = token_rows()
    TokenRows.of_rows(rows, [WIDTH] * ROWS).save(folder / "rows")
    plain = set(batch_indices(SEED, 0, 4, ROWS)[1::2])  # rank 1 has no merge in the first step
    until = [0 if index in plain else WIDTH for index in range(ROWS)]
    TokenRows.of_rows(rows, until).save(folder / "one-sided")
    rows[batch_indices(SEED, 0, 4, ROWS)[1]][10] = POISON  # rank 1 meets it in the first step
    TokenRows.of_rows(rows, [WIDTH] * ROWS).save(folder / "poisoned")
    return tiny_job(folder, WIDTH, CONFIG, start=str(folder / "start"), seed=SEED)


def on(job: TrainJob, kind: str) -> TrainJob:
    """Return the job over rows of that kind."""
    return replace(job, train=str(Path(job.train).with_name(kind)))


def rowed(job: TrainJob) -> TrainJob:
    """Return the job of a module with rule rows; rank 1 has no merge in the first step."""
    return replace(on(job, "one-sided"), start=str(Path(str(job.start)).with_name("rowed")))


def run_pair(folder: Path, jobs: list[TrainJob]) -> None:
    """Run jobs in two processes."""
    for job in jobs:
        Path(job.out).mkdir(parents=True, exist_ok=True)
    run_ranks(folder, 2, train_jobs, *jobs)


@pytest.fixture(scope="module")
def joint(job: TrainJob, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process over the whole batches."""
    out = tmp_path_factory.mktemp("joint")
    run_worker(replace(job, out=str(out)))
    return out


@pytest.fixture(scope="module")
def runs(job: TrainJob, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks: each strategy over each kind of rows."""
    out = tmp_path_factory.mktemp("ranks")
    jobs = [
        replace(on(job, kind), strategy=name, out=str(out / f"{name}-{kind}"))
        for name in STRATEGIES
        for kind in KINDS
    ]
    run_pair(out, [*jobs, replace(rowed(job), out=str(out / "rule-rows"))])
    return out


def state(out: Path, step: int, rank: int = 0) -> dict[str, Tensor]:
    return load_file(out / "state" / f"step-{step:08d}" / f"rank-{rank}.safetensors")


def weights(out: Path, step: int, rank: int = 0) -> Tensor:
    tensors = state(out, step, rank)
    return torch.cat([v.flatten() for k, v in tensors.items() if k.startswith("module.")])


def first_moment(out: Path, ranks: int) -> Tensor:
    """Flat ``exp_avg`` after step 1: all parameters of rank 0, or the shards of all ranks."""
    parts = [state(out, 1, rank) for rank in range(ranks)]
    names = [f"optimizer.{index}.exp_avg" for index in range(9)]
    return torch.cat([part[name].flatten() for part in parts for name in names if name in part])


def curve(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]


def expected_first_moment(job: TrainJob, *, joint: bool) -> Tensor:
    """0.1 x clipped gradient by autograd: of the joint mean, or of the mean of two ranks' means."""
    backbone = load_backbone(job.backbone)
    assert job.start is not None and job.rules is not None
    module = Checkpoint.load(job.start).module.requires_grad_(True)
    rows = TokenRows.load(Path(job.train), WIDTH)
    model = MergedModel(backbone, module, Matcher(RuleSet.load(job.rules)))
    objective = DistillObjective(
        model, rows, rows, CONFIG, bf16=False, batch_size=CONFIG.batch_size
    )
    batch = batch_indices(SEED, 0, CONFIG.batch_size, ROWS)
    shares = [batch] if joint else [batch[0::2], batch[1::2]]
    losses = [objective(share) for share in shares]
    torch.stack([loss.total / loss.weight for loss in losses]).mean().backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
    return 0.1 * gradient * (CONFIG.clip_norm / gradient.norm()).clamp(max=1.0)


@pytest.mark.parametrize("kind", ["rows", "one-sided"])
@pytest.mark.parametrize(("name", "ranks"), [("ddp", 1), ("deepspeed", 2)])
def test_two_ranks_see_the_gradient_of_the_joint_batch(
    job: TrainJob, runs: Path, name: str, ranks: int, kind: str
) -> None:
    found = first_moment(runs / f"{name}-{kind}", ranks)
    expected = expected_first_moment(on(job, kind), joint=True)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_ranks_end_with_equal_weights_and_the_curve_of_one_process(
    joint: Path, runs: Path, name: str
) -> None:
    pair = runs / f"{name}-rows"
    for step in (1, 2):
        torch.testing.assert_close(weights(pair, step), weights(joint, step), atol=2e-5, rtol=1e-4)
    assert torch.equal(weights(pair, 2, rank=0), weights(pair, 2, rank=1))
    for row, other in zip(curve(pair), curve(joint), strict=True):
        assert row == pytest.approx(other, rel=1e-4)


def test_rule_rows_of_two_ranks_end_as_those_of_one_process(
    job: TrainJob, runs: Path, tmp_path: Path
) -> None:
    run_worker(replace(rowed(job), out=str(tmp_path)))
    for step in (1, 2):
        pair, alone = state(runs / "rule-rows", step), state(tmp_path, step)
        assert torch.equal(pair["optimizer.rows.steps"], alone["optimizer.rows.steps"])
        torch.testing.assert_close(
            weights(runs / "rule-rows", step), weights(tmp_path, step), atol=2e-5, rtol=1e-4
        )
        other = state(runs / "rule-rows", step, rank=1)
        names = [name for name in pair if name.startswith(("module.", "optimizer.rows."))]
        assert all(torch.equal(pair[name], other[name]) for name in names)
    assert pair["optimizer.rows.steps"].tolist() == [2, 0]  # only the first rule occurs


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_that_is_nan_on_one_rank_is_skipped_on_all(
    job: TrainJob, runs: Path, name: str
) -> None:
    out = runs / f"{name}-poisoned"
    assert curve(out)[1] == {"step": 1, "skipped": 1.0}
    assert job.start is not None
    start = Checkpoint.load(job.start).module.state_dict()
    for rank in (0, 1):
        after = state(out, 1, rank)
        assert all(torch.equal(after[f"module.{key}"], value) for key, value in start.items())
        assert not torch.equal(weights(out, 1, rank), weights(out, 2, rank))
        assert bool(torch.isfinite(weights(out, 2, rank)).all())


@pytest.mark.full
def test_two_ranks_resume_from_the_state_before_a_torn_one_bit_for_bit(
    job: TrainJob, runs: Path, tmp_path: Path
) -> None:
    jobs = {f"{name}-rows": replace(job, strategy=name) for name in STRATEGIES}
    jobs["rule-rows"] = rowed(job)
    for name in jobs:
        shutil.copytree(runs / name / "state", tmp_path / name / "state")
        torn = tmp_path / name / "state" / "step-00000002" / "rank-1.safetensors"
        torn.write_bytes(torn.read_bytes()[:-1])
    run_pair(tmp_path, [replace(job, out=str(tmp_path / name)) for name, job in jobs.items()])
    for name in jobs:
        for file in ("rank-0.safetensors", "rank-1.safetensors", "rank-0.json", "manifest.json"):
            place = Path("state", "step-00000002", file)
            again, first = tmp_path / name / place, runs / name / place
            assert again.read_bytes() == first.read_bytes()
