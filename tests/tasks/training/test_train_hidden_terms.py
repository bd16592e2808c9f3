"""Training with hidden-state terms in the loss: resumed runs, and what the curve shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.tiny_training import CONFIG, Run, train_here, train_until
from umim_core.config.hidden_term import HiddenTerm

SHORT = CONFIG.model_copy(update={"max_steps": 6})
TERMS = (HiddenTerm(layers="all", weight=2.0), HiddenTerm(layers="last", distance="mse"))


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole", config=SHORT, hidden_terms=TERMS)
    train_here(whole)
    resumed = replace(whole, folder=tmp_path / "resumed")
    train_until(resumed, 4)  # one step after a state
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
