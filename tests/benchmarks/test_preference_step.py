from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common import Report, facts, no_error_gate_missed
from benchmarks.engine_sides import Subject, random_subject
from benchmarks.preference_step import (
    gates,
    main,
    measure,
)
from support.tiny_models import tiny_config

SHAPE = argparse.Namespace(device="cpu", questions=2, answers=3, context=24, ending=6, rounds=1)
TEXT = SHAPE.questions * (SHAPE.context + SHAPE.answers * SHAPE.ending)


@pytest.fixture(scope="module")
def given() -> Subject:
    config = tiny_config(vocab_size=500, initializer_range=0.02)
    return random_subject(config, TEXT, dtype="float32", device="cpu", mined=20_000)


@pytest.fixture(scope="module")
def report(given: Subject) -> Report:
    found: Report = {
        "benchmark": "preference_step",
        "facts": facts(("torch",), "abc"),
        **vars(SHAPE),
        "checkpoints": {"tiny": measure(given, SHAPE)},
    }
    found["gates"] = gates(found)
    found["equal"] = no_error_gate_missed(found)
    return found


def test_both_sides_give_one_loss_and_one_gradient(report: Report) -> None:
    measured = report["checkpoints"]["tiny"]
    assert report["equal"]
    assert measured["token_reduction"] > 0.05
    assert measured["loss"] != pytest.approx(np.log(2), abs=1e-6)  # not at the reference


def test_a_step_that_is_too_slow_misses_its_gate(report: Report) -> None:
    slow = copy.deepcopy(report)
    slow["checkpoints"]["tiny"]["times"]["median"] = 1.79
    assert not gates(slow)["tiny_times"][2]
    slow["checkpoints"]["tiny"]["times"]["median"] = 1.81
    assert gates(slow)["tiny_times"][2]


@pytest.mark.full
def test_a_small_run_of_a_shipped_checkpoint_agrees(tmp_path: Path) -> None:
    out = tmp_path / "preference_step.json"
    sizes = ["--questions", "1", "--context", "32", "--ending", "4", "--rounds", "1"]
    main(["--checkpoints", "umim-docs-gpt2", "--out", str(out), *sizes])
    found = json.loads(out.read_text("utf-8"))
    assert list(found["checkpoints"]) == ["umim-docs-gpt2"] and found["equal"]
    assert "umim-docs-gpt2 times" in out.with_suffix(".md").read_text("utf-8")
