"""The benchmark of the step on a real model: its sides agree, and its gates can fail."""

from __future__ import annotations

import argparse
import copy
import os

import pytest
import torch

from benchmarks import distill_smollm2
from benchmarks.common import Report, facts
from benchmarks.distill_sides import LENGTH, Batch, step_flops
from benchmarks.distill_smollm2 import (
    CASTS,
    OURS,
    OWN,
    SINGLE,
    equal,
    gates,
    measure,
)
from benchmarks.engine_sides import random_subject
from docs.make.results import benchmark_page
from support.tiny_models import tiny_config
from umim_core import UMIM
from umim_core.backbone.shape import BackboneShape
from umim_core.errors import ConfigError
from umim_core.merging.module import MergeModule


@pytest.fixture(scope="module")
def batch() -> Batch:
    config = tiny_config(vocab_size=500, max_position_embeddings=LENGTH, initializer_range=0.02)
    given = random_subject(config, 2 * LENGTH, dtype="float32", device="cpu", mined=40_000)
    module = MergeModule(given.backbone.hidden_size)
    module.initialise(given.backbone.embedding_std, torch.Generator().manual_seed(0))
    rows = list(given.ids.reshape(2, LENGTH))
    matcher = given.compressed.require_matcher()
    return Batch(given.backbone, module, rows, [matcher.segment(row) for row in rows])


@pytest.fixture(scope="module")
def report(batch: Batch) -> Report:
    found: Report = {
        "benchmark": "distill_smollm2",
        "facts": facts(("torch",), "abc"),
        "sets": {OWN: measure(batch, argparse.Namespace(rounds=1))},
    }
    return found | {"gates": gates(found), "equal": equal(found)}


def test_held_weights_give_the_bits_of_casts_and_halves_are_near_float32(report: Report) -> None:
    sides = report["sets"][OWN]["sides"]
    assert report["equal"]
    assert sides[SINGLE]["gradient_error"] == 0.0
    assert 1e-5 < sides[OURS]["gradient_error"] == sides[CASTS]["gradient_error"] < 0.1


def test_the_work_is_that_of_every_product(batch: Batch) -> None:
    model, units = batch.backbone.model, sum(len(starts) for starts, _ in batch.cuts)
    blocks = sum(w.numel() for n, w in model.model.layers.named_parameters() if "proj" in n)
    head = batch.backbone.head_weight.numel()
    products = 2 * blocks * (2 * LENGTH + 2 * units) + 6 * head * units
    width = (
        model.config.num_hidden_layers * model.config.num_attention_heads * model.config.head_dim
    )
    uncausal = 4 * width * LENGTH * (2 * LENGTH + 3 * units)  # twice what attention needs
    assert (
        products
        < step_flops(BackboneShape.of_config(model.config), 2 * LENGTH, units)
        < products + uncausal
    )


def test_a_slow_step_or_other_bits_fail(report: Report) -> None:
    worse = copy.deepcopy(report)
    for side in worse["sets"][OWN]["sides"].values():
        side["seconds"]["median"] = 6.1
    worse["sets"][OWN]["equal"] = False
    assert gates(report)["seconds a step"][2]
    assert not gates(worse)["seconds a step"][2]
    assert not equal(worse)


def test_the_page_shows_every_side_and_the_bound(report: Report) -> None:
    page = benchmark_page(report)
    for text in (OURS, CASTS, SINGLE, "bound, bfloat16", "seconds a step"):
        assert text in page


@pytest.mark.parametrize("given", [None, "AVX512_CORE", "AVX2"])
@pytest.mark.parametrize("name", [OWN, "AVX512_CORE"])
def test_a_set_is_measured_where_it_holds_and_a_setting_of_ones_own_stays(
    name: str, given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable, held = "ONEDNN_MAX_CPU_ISA", list[str | None]()

    def here(*_: object) -> Report:
        held.append(os.environ.get(variable))
        return {}

    def child(module: str, isa: str, **_: object) -> Report:
        return {"sets": {isa: here()}}

    monkeypatch.delenv(variable, raising=False)
    if given is not None:
        monkeypatch.setenv(variable, given)
    monkeypatch.setattr(distill_smollm2, "measure", here)
    monkeypatch.setattr(distill_smollm2, "batch_of", lambda *_: None)
    monkeypatch.setattr(UMIM, "from_pretrained", lambda *_, **__: None)
    monkeypatch.setattr(distill_smollm2, "fresh", child)
    options = argparse.Namespace(checkpoint="x", rows=1, rounds=1)
    if name == OWN and given is not None:
        with pytest.raises(ConfigError, match="must not be set where DEFAULT is measured"):
            distill_smollm2.measure_set(name, options)
        return
    distill_smollm2.measure_set(name, options)
    assert held == [None if name == OWN else name]
    assert os.environ.get(variable) == given


def test_without_the_checkpoint_one_line_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit, match=r"skipped: .*no-such-checkpoint"):
        distill_smollm2.main(["--checkpoint", "no-such-checkpoint"])
