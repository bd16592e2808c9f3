from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.tiny_training import CONFIG, SPANS, Run, train_here
from tasks.training.strategies import DeepSpeedStrategy
from umim_core.config.recipe import DistillConfig
from umim_core.errors import ConfigError
from umim_core.training.optimizer import AdamWStrategy

SHORT = CONFIG.model_copy(update={"max_steps": 6})


def test_rows_of_rules_that_never_occur_stay_as_they_were(tmp_path: Path) -> None:
    run = Run(tmp_path, config=SHORT, rule_rows=2)
    train_here(run)
    ours = run.state(6)
    assert ours["optimizer.rows.steps"].tolist() == [6, 0]  # the second rule never occurs
    assert bool(ours["module.rows.table"][0].all()) and not bool(ours["module.rows.table"][1].any())


def test_rows_count_in_the_norm_and_are_clipped_with_the_rest(tmp_path: Path) -> None:
    objective = Run(tmp_path, rule_rows=len(SPANS)).objective()
    config = DistillConfig.model_validate(CONFIG.model_dump() | {"row_rate": 3.0})
    strategy = AdamWStrategy(objective, config)
    loss = objective([0, 1, 2, 3])
    found = torch.autograd.grad(loss.total, list(objective.parameters()), retain_graph=True)
    norm = torch.stack([part.to_dense().norm() for part in found]).norm()
    assert strategy.update(loss.total, 1e-2) == pytest.approx(float(norm), rel=1e-5)
    first = strategy.tensors()["optimizer.rows.exp_avg"]  # 0.1 times the clipped gradient
    (rows,) = (part for part in found if part.is_sparse)
    want = 0.1 * rows.to_dense() * CONFIG.clip_norm / (norm + 1e-6)
    torch.testing.assert_close(first, want, rtol=1e-4, atol=1e-8)
    moved = objective.module.rows.table.detach().abs().max()
    assert float(moved) == pytest.approx(3.0 * 1e-2, rel=1e-3)  # AdamW's first step


def test_sharded_optimisers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"need strategy ddp: ZeRO-2 .*; got deepspeed"):
        DeepSpeedStrategy(Run(tmp_path, rule_rows=2).objective(), CONFIG)
