"""The benchmark of the distillation step: its sides agree, and its gates can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.common import ROOT, Report, facts
from benchmarks.corpus import EMBEDDED
from benchmarks.distill_sides import (
    LENGTH,
    LIGER,
    OURS,
    PLAIN,
    Shape,
    compare,
    embedded_batch,
    liger_version,
    loss_sides,
    step_sides,
)
from benchmarks.distill_step import gates
from docs.make.results import benchmark_page
from umim_core.checkpoint.checkpoint import Checkpoint

TINY = Shape(rows=300, hidden=16, vocab=101)


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of the checkpoint's own rules, one after the other."""
    target = tmp_path_factory.mktemp("ids") / "ids.npy"
    spans = Checkpoint.load(EMBEDDED).rules.ids_by_order[2][:LENGTH]
    np.save(target, np.resize(spans.reshape(-1), LENGTH).astype(np.int32), allow_pickle=False)
    return target


@pytest.fixture(scope="module")
def losses() -> Report:
    sides = compare(loss_sides(TINY), rounds=1)
    for number, found in enumerate(sides.values()):
        found["bytes"] = 1.0 + 9.0 * number  # ours first
    return {"rows": TINY.rows, "hidden": TINY.hidden, "vocab": TINY.vocab, "sides": sides}


@pytest.fixture(scope="module")
def report(losses: Report) -> Report:
    sides = {name: losses["sides"][name] for name in (OURS, PLAIN)}
    step = {"rows": 1, "tokens": LENGTH, "units": 400, "precisions": {"float32": sides}}
    found: Report = {
        "benchmark": "distill_step",
        "facts": facts(("torch",), "abc"),
        "liger": None,
        "losses": {"embedded": losses},
        "step": step,
        "equal": True,
    }
    return found | {"gates": gates(found)}


@pytest.mark.full
def test_a_small_run_ends_with_its_gates_as_json(ids: Path) -> None:
    options = ["--ids", str(ids), "--shapes", "embedded", "--rows", "1", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, "benchmarks/distill_step.py", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["equal"], done.stdout
    assert done.returncode == int(not all(passed for _, _, passed in found["gates"].values()))
    ours, plain = (found["losses"]["embedded"]["sides"][side]["bytes"] for side in (OURS, PLAIN))
    assert 0 < ours < plain


def test_too_few_ids_are_refused(ids: Path) -> None:
    with pytest.raises(SystemExit, match="must hold 1024 ids, not 512"):
        embedded_batch(ids, 2)


def test_all_sides_of_the_loss_agree() -> None:
    sides = loss_sides(TINY)
    assert set(sides) == {OURS, PLAIN} | ({LIGER} if liger_version() else set())
    loss, gradient = sides[PLAIN]()
    for side in sides.values():
        other_loss, other = side()
        assert other_loss == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(other, gradient, rtol=1e-4, atol=1e-7)


def test_both_sides_of_a_step_agree(ids: Path) -> None:
    sides = step_sides(embedded_batch(ids, 1), autocast=False)
    (loss, gradient), (plain_loss, plain_gradient) = sides[OURS](), sides[PLAIN]()
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    assert float((gradient - plain_gradient).norm() / plain_gradient.norm()) < 1e-4


def test_a_side_with_another_result_fails_its_gates(report: Report, losses: Report) -> None:
    assert report["gates"]["loss_embedded_error"][2]
    assert report["gates"]["loss_embedded_memory"][2]
    wrong = loss_sides(TINY) | {OURS: lambda: (0.0, torch.ones(TINY.rows, TINY.hidden))}
    sides = compare(wrong, rounds=1)
    for found in sides.values():
        found["bytes"] = 1.0
    judged = gates(report | {"losses": {"embedded": losses | {"sides": sides}}})
    assert not judged["loss_embedded_error"][2]
    assert not judged["loss_embedded_gradient_error"][2]
    assert not judged["loss_embedded_memory"][2]  # as much as the plain side


def test_the_page_shows_every_side_and_every_gate(report: Report) -> None:
    page = benchmark_page(report)
    for name in (f"loss, embedded: {OURS}", f"step, float32: {PLAIN}", "step error"):
        assert name in page
    assert page.count("\n| ") > len(report["gates"])
