"""The benchmark of the step on a GPU: its inputs and gates, and a small run on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.common import Report, facts
from benchmarks.distill_gpu import gates, main, random_cuts
from benchmarks.distill_sides import LIGER, OURS, PLAIN, Shape
from docs.make.results import benchmark_page
from umim_core.backbone.shape import BackboneShape

SPREAD = {"median": 1.0, "low": 0.9, "high": 1.1, "runs": 3}
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


def side(over_bound: float, size: float = 1e9, error: float = 1e-3) -> Report:
    return {
        "seconds": SPREAD,
        "over_bound": over_bound,
        "time_ratio": SPREAD,
        "gradient_error": error,
        "bytes": size,
    }


def report(sides: dict[str, Report], share: float = 0.5) -> Report:
    steps = {OURS: {"seconds": SPREAD, "mfu": share, "bytes": 1e9}}
    found: Report = {
        "benchmark": "distill_gpu",
        "facts": facts(("torch",), "abc") | {"device": "a GPU"},
        "liger": "0.8.5",
        "peak_flops": 8e14,
        "loss": {"rows": 8, "hidden": 4, "vocab": 9, "bound_seconds": 1e-3, "sides": sides},
        "step": {
            "rows": 1,
            "tokens": 9,
            "units": 5,
            "parameters": 10**9,
            "bound_bytes": 1e9,
            "sides": steps,
        },
        "equal": True,
    }
    return found | {"gates": gates(found)}


def test_every_row_is_covered_and_loses_about_what_was_asked() -> None:
    cuts = random_cuts(4, 1000, 0.4)
    for starts, lengths in cuts:
        assert lengths.min() >= 1
        assert lengths.max() <= 3
        assert (lengths.cumsum() - lengths == starts).all()
        assert lengths.sum() == 1000
    assert 1 - sum(len(starts) for starts, _ in cuts) / 4000 == pytest.approx(0.4, abs=0.03)


def test_gates_can_fail() -> None:
    sides = {OURS: side(1.2), PLAIN: side(4.0), LIGER: side(1.8)}
    assert all(passed for _, _, passed in report(sides)["gates"].values())
    slow = {name: side(1.5, size=3e9, error=0.2) for name in (OURS, PLAIN, LIGER)}
    judged = report(slow, share=0.4)["gates"]
    assert len(judged) == 5
    assert not any(passed for _, _, passed in judged.values())


def test_the_page_shows_every_side_and_gate() -> None:
    sides = {OURS: side(1.2), PLAIN: side(4.0)}
    page = benchmark_page(report(sides))
    for name in (f"| {OURS} ", f"| {PLAIN} ", "a GPU", "50.0 %", "step mfu"):
        assert name in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="needs a GPU"):
        main([])


@pytest.mark.full
def test_a_small_run_on_the_cpu_agrees_and_is_written_down(tmp_path: Path) -> None:
    out = tmp_path / "distill_gpu.json"
    arguments = ["--device", "cpu", "--rows", "2", "--length", "64", "--rounds", "1"]
    main([*arguments, "--out", str(out)], Shape(256, 64, 512), SMALL)
    found = json.loads(out.read_text())
    assert found["equal"]
    assert found["step"]["tokens"] == 128
    assert set(found["step"]["sides"]) == {OURS}
    assert out.with_suffix(".md").read_text() == benchmark_page(found)
