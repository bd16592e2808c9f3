"""The benchmark of the distillation step: its sides agree, and its gates can fail."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.common import Report, facts, no_error_gate_missed
from benchmarks.corpus import EMBEDDED
from benchmarks.distill_sides import (
    LENGTH,
    LIGER,
    OURS,
    PLAIN,
    Batch,
    Shape,
    compare,
    embedded_batch,
    fresh_module,
    liger_version,
    loss_sides,
    step_sides,
)
from benchmarks.distill_step import CASTS, SINGLE, gates, main, measure_precisions
from benchmarks.engine_sides import random_subject
from docs.make.results import benchmark_page
from support.processes import run_command
from support.tiny_models import tiny_config
from umim_core.backbone.shape import BackboneShape
from umim_core.checkpoint.checkpoint import Checkpoint

TINY = Shape(rows=300, hidden=16, vocab=101)
SMALL = BackboneShape(
    hidden_size=64,
    intermediate_size=128,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab_size=128,
    tied=True,
    gated_mlp=True,
)


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


@pytest.mark.full
def test_a_small_run_ends_with_its_gates_as_json(ids: Path) -> None:
    options = ["--ids", ids, "--shapes", "embedded", "--rows", 1, "--rounds", 1]
    done = run_command(sys.executable, "benchmarks/distill_step.py", *options)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["equal"], done.stdout
    assert done.returncode == int(not all(passed for _, _, passed in found["gates"].values()))
    ours, plain = (found["losses"]["embedded"]["sides"][side]["bytes"] for side in (OURS, PLAIN))
    assert 0 < ours < plain


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


@pytest.fixture(scope="module")
def batch() -> Batch:
    config = tiny_config(vocab_size=500, max_position_embeddings=LENGTH, initializer_range=0.02)
    subject = random_subject(config, 2 * LENGTH, dtype="float32", device="cpu", mined=40_000)
    rows = list(subject.ids.reshape(2, LENGTH))
    matcher = subject.merged_model.require_matcher()
    cuts = [matcher.segment(row) for row in rows]
    return Batch(subject.backbone, fresh_module(subject.backbone), rows, cuts)


@pytest.fixture(scope="module")
def precise(batch: Batch) -> Report:
    measured: Report = {
        "benchmark": "distill_step",
        "facts": facts(("torch",), "abc"),
        "on": "smollm2",
        "losses": {},
        "step": measure_precisions(batch, 1),
    }
    judged = gates(measured)
    return measured | {"gates": judged, "equal": no_error_gate_missed({"gates": judged})}


def test_held_weights_give_the_bits_of_casts_and_halves_are_near_float32(precise: Report) -> None:
    (sides,) = precise["step"]["precisions"].values()
    assert precise["equal"]
    assert sides[SINGLE]["gradient_error"] == 0.0
    assert 1e-5 < sides[OURS]["gradient_error"] == sides[CASTS]["gradient_error"] < 0.1
    page = benchmark_page(precise)
    assert all(text in page for text in (OURS, CASTS, SINGLE, "over the bound", "seconds a step"))


def test_a_slow_step_or_other_bits_fail(precise: Report) -> None:
    worse = copy.deepcopy(precise)
    (sides,) = worse["step"]["precisions"].values()
    for side in sides.values():
        side["seconds"]["median"] = 6.1
    worse["step"]["equal"] = False
    assert gates(precise)["seconds_a_step"][2]
    assert not any(passed for _, _, passed in gates(worse).values())
    assert not no_error_gate_missed({"gates": gates(worse)})


@pytest.mark.full
def test_a_small_run_on_the_cpu_agrees_and_is_written_down(tmp_path: Path) -> None:
    out = tmp_path / "distill_gpu.json"
    arguments = ["--on", "gpu", "--device", "cpu", "--rows", "2", "--length", "64", "--rounds", "1"]
    main([*arguments, "--out", str(out)], Shape(256, 64, 512), SMALL)
    written = json.loads(out.read_text())
    assert written["equal"]
    assert written["step"]["tokens"] == 128
    assert set(written["step"]["precisions"]["bfloat16"]) == {OURS}
    assert out.with_suffix(".md").read_text() == benchmark_page(written)
