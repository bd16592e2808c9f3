"""Two real processes over gloo: gradients of DDP and ZeRO-2 against the joint batch, and resume.

What a rank leaves in its resume state (weights, AdamW moments) is what is compared. After AdamW's
first step ``exp_avg`` is (1 - beta_1) = 0.1 times the clipped gradient. Tolerances: the sum over a
batch's rows is taken in another order, so single-precision rounding is all that may differ.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from support.tiny_training import CONFIG, ROWS, SEED, Run, train_here
from support.training_processes import run_ranks
from tasks.training.strategies import DeepSpeedStrategy
from umim_core.errors import ConfigError
from umim_core.training.train_loop import batch_indices

STRATEGIES = ("ddp", "deepspeed")
SHORT = CONFIG.model_copy(update={"max_steps": 2, "checkpoint_every": 1})
FIRST = batch_indices(SEED, 0, SHORT.batch_size, ROWS)
ONE_SIDED = tuple(index not in FIRST[1::2] for index in range(ROWS))  # rank 1 has no merge first
KINDS: dict[str, dict[str, Any]] = {
    "rows": {},
    "one-sided": {"merges": ONE_SIDED},
    "poisoned": {"poisoned": 1},
}


def train_each(rank: int, *runs: Run) -> None:
    for run in runs:
        train_here(run, rank)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Run]:
    """Two ranks: each strategy over each kind of rows, and a module with rule rows."""
    out = tmp_path_factory.mktemp("ranks")
    found = {
        (name, kind): Run(out / f"{name}-{kind}", name, SHORT, **KINDS[kind])
        for name in STRATEGIES
        for kind in KINDS
    }
    rowed = Run(out / "rule-rows", config=SHORT, merges=ONE_SIDED, rule_rows=2)
    found["ddp", "rule-rows"] = rowed
    found["ddp", "preference"] = Run(out / "preference", config=SHORT, preference=True)
    run_ranks(out, 2, train_each, *found.values())
    return found


def state(run: Run, step: int, rank: int = 0) -> dict[str, Tensor]:
    return load_file(run.folder / f"step-{step:08d}" / f"rank-{rank}.safetensors")


def weights(run: Run, step: int, rank: int = 0) -> Tensor:
    tensors = state(run, step, rank)
    return torch.cat([v.flatten() for k, v in tensors.items() if k.startswith("module.")])


def first_moment(run: Run, ranks: int) -> Tensor:
    """Flat ``exp_avg`` after step 1: all parameters of rank 0, or the shards of all ranks."""
    parts = [state(run, 1, rank) for rank in range(ranks)]
    names = [f"optimizer.{index}.exp_avg" for index in range(9)]
    return torch.cat([part[name].flatten() for part in parts for name in names if name in part])


def moment_bytes(run: Run, rank: int = 0) -> int:
    return sum(tensor.nbytes for name, tensor in state(run, 2, rank).items() if "exp_avg" in name)


def curve(run: Run) -> list[dict[str, float]]:
    record = json.loads((run.folder / "step-00000002" / "rank-0.json").read_text("utf-8"))
    return [dict(row) for row in record["curve"]]


@pytest.mark.parametrize("kind", ["rows", "one-sided"])
@pytest.mark.parametrize(("name", "ranks"), [("ddp", 1), ("deepspeed", 2)])
def test_two_ranks_see_the_gradient_of_the_joint_batch(
    runs: dict[tuple[str, str], Run], name: str, ranks: int, kind: str
) -> None:
    run = runs[name, kind]
    goal = run.objective()
    shares = [goal(FIRST[rank::2]).weight for rank in (0, 1)]
    assert shares[0] != shares[1]  # so that a mean of ranks' means is wrong
    loss = goal(FIRST)
    (loss.total / loss.weight).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in goal.module.parameters()])
    assert gradient.norm() > SHORT.clip_norm  # so that clipping is seen
    expected = 0.1 * gradient * SHORT.clip_norm / gradient.norm()
    torch.testing.assert_close(first_moment(run, ranks), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "kind"), [("ddp", "rows"), ("deepspeed", "rows"), ("ddp", "preference")]
)
def test_two_ranks_end_with_equal_weights_and_the_curve_of_one_process(
    runs: dict[tuple[str, str], Run], tmp_path: Path, name: str, kind: str
) -> None:
    pair = runs[name, kind]
    joint = replace(pair, folder=tmp_path, strategy="ddp")
    train_here(joint)
    for step in (1, 2):
        torch.testing.assert_close(weights(pair, step), weights(joint, step), atol=2e-5, rtol=1e-4)
    assert torch.equal(weights(pair, 2, rank=0), weights(pair, 2, rank=1))
    share = 0.51 if name == "deepspeed" else 1.0  # ZeRO-2 halves the moments of a rank
    for rank in (0, 1):
        assert moment_bytes(pair, rank) <= share * moment_bytes(joint)
    for row, other in zip(curve(pair), curve(joint), strict=True):
        assert row == pytest.approx(other, rel=1e-4)


def test_rule_rows_of_two_ranks_end_as_those_of_one_process(
    runs: dict[tuple[str, str], Run], tmp_path: Path
) -> None:
    run = runs["ddp", "rule-rows"]
    joint = replace(run, folder=tmp_path)
    train_here(joint)
    for step in (1, 2):
        pair, alone, other = state(run, step), state(joint, step), state(run, step, rank=1)
        assert torch.equal(pair["optimizer.rows.steps"], alone["optimizer.rows.steps"])
        torch.testing.assert_close(weights(run, step), weights(joint, step), atol=2e-5, rtol=1e-4)
        names = [name for name in pair if name.startswith(("module.", "optimizer.rows."))]
        assert all(torch.equal(pair[name], other[name]) for name in names)
    assert pair["optimizer.rows.steps"].tolist() == [2, 0]  # only the first rule occurs
    assert pair["module.rows.table"][0].all() and not pair["module.rows.table"][1].any()


def test_rule_rows_with_sharded_optimisers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"need strategy ddp: ZeRO-2 .*; got deepspeed"):
        DeepSpeedStrategy(Run(tmp_path, rule_rows=2).objective(), CONFIG)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_that_is_nan_on_one_rank_is_skipped_on_all(
    runs: dict[tuple[str, str], Run], name: str
) -> None:
    run = runs[name, "poisoned"]
    assert curve(run)[1] == {"step": 1, "skipped": 1.0}
    start = run.objective().module.state_dict()
    for rank in (0, 1):
        after = state(run, 1, rank)
        assert all(torch.equal(after[f"module.{key}"], value) for key, value in start.items())
        assert not torch.equal(weights(run, 1, rank), weights(run, 2, rank))
        assert bool(torch.isfinite(weights(run, 2, rank)).all())
