"""Training with hidden-state terms in the loss: resumed runs, and what the curve shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.tiny_training import CONFIG, SEED, Run, train_here
from tasks.training.strategies import DdpStrategy
from umim_core.config.hidden_term import HiddenTerm
from umim_core.distill.train_loop import train
from umim_core.distill.train_state import Progress

SHORT = CONFIG.model_copy(update={"max_steps": 6})
TERMS = (HiddenTerm(layers="all", weight=2.0), HiddenTerm(layers="last", distance="mse"))


class Stopped(Exception):
    """Ends a run from outside."""


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole", config=SHORT, hidden_terms=TERMS)
    train_here(whole)
    resumed = replace(whole, folder=tmp_path / "resumed")
    goal = resumed.objective()

    def stop(progress: Progress, total: int) -> None:
        if progress.step == 4:  # one step after a state
            raise Stopped

    with pytest.raises(Stopped):
        train(
            goal, DdpStrategy(goal, SHORT), SHORT, seed=SEED, state_dir=resumed.folder, on_step=stop
        )
    _, again = train_here(resumed)
    assert again.batches == 3  # steps 4, 5 and 6
    ours, theirs = resumed.state(6), whole.state(6)
    assert ours.keys() == theirs.keys()
    differ = {name for name in ours if not torch.equal(ours[name], theirs[name])}
    assert differ <= {"rng.torch"}  # the process went on drawing between the two runs
    assert resumed.curve() == whole.curve()


def test_the_curve_shows_every_term_on_its_own(tmp_path: Path) -> None:
    one_step = CONFIG.model_copy(update={"max_steps": 1})
    plain, _ = train_here(Run(tmp_path / "plain", config=one_step))
    found, _ = train_here(Run(tmp_path / "terms", config=one_step, hidden_terms=TERMS))
    (before, first, after), (_, bare, _) = found.progress.curve, plain.progress.curve
    assert first.keys() - bare.keys() == {"train_hidden_all", "train_hidden_last"}
    terms = 2.0 * first["train_hidden_all"] + first["train_hidden_last"]
    assert first["train_loss"] == pytest.approx(bare["train_loss"] + terms, rel=1e-6)
    assert first["train_kl"] == bare["train_kl"]
    assert before["valid_cross_entropy"] == plain.progress.curve[0]["valid_cross_entropy"]
    assert before["valid_hidden_all"] > after["valid_hidden_all"] > 0.0
    scores = [before["valid_cross_entropy"], after["valid_cross_entropy"]]
    assert found.progress.best_score == min(scores)
