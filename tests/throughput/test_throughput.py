"""Structure of the throughput rows, the bounds, and the roofline that refuses impossible ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from support.tiny_models import random_backbone
from umim_core.backbone.backbone import Backbone
from umim_core.config.evaluate import BenchmarkConfig
from umim_core.errors import EvaluationError
from umim_core.inference.engine import Engine
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.throughput.break_even import ThroughputRow
from umim_core.throughput.roofline import ModelShape, Roofline
from umim_core.throughput.throughput import (
    FixedPairs,
    Prompts,
    cut_prompts,
    measure_throughput,
    time_run,
)

IDS = np.arange(200, dtype=np.int64) % 7 + 1
UNBOUNDED = Roofline(1e30)
NATURAL = Matcher(RuleSet.from_spans([(1, 2), (4, 5, 6)]))  # the ids repeat 1 .. 7


def tiny(kind: str = "llama") -> Backbone:
    return random_backbone(kind, max_position_embeddings=128)


def measure(roofline: Roofline | None = UNBOUNDED, **protocol: object) -> list[ThroughputRow]:
    config = BenchmarkConfig(**{"warmup": 0, "pairs": 1, "new_tokens": 3, **protocol})
    return measure_throughput(
        MergedModel(tiny(), MergeModule(16), NATURAL, "compact"), IDS, config, roofline=roofline
    )


@pytest.fixture(scope="module")
def rows() -> list:
    return measure(prompt_lengths=(21, 42), new_tokens=5, batch_sizes=(2,), pairs=3)


def test_rows_cover_every_length_kind_and_phase(rows: list) -> None:
    assert [(r.prompt_tokens, r.rules, r.phase) for r in rows] == [
        (length, rules, phase)
        for length in (21, 42)
        for rules in ("fixed-pairs", "natural")
        for phase in ("prefill", "decode", "request")
    ]
    assert {(r.batch_size, r.new_tokens, r.pairs) for r in rows} == {(2, 5, 3)}


def test_token_reduction_is_the_realised_one(rows: list) -> None:
    reduction = {(r.rules, r.phase, r.prompt_tokens): r.token_reduction for r in rows}
    assert reduction["fixed-pairs", "prefill", 42] == 0.5
    assert reduction["fixed-pairs", "prefill", 21] == pytest.approx(10 / 21)  # one token is left
    runs = [cut_prompts(IDS, (2, 42, 5), run, "greedy").ids for run in range(3)]
    units = [len(NATURAL.segment(prompt)[0]) for run in runs for prompt in run]
    assert reduction["natural", "prefill", 42] == pytest.approx(1 - np.mean(units) / 42)
    # 21 units after the prompt; then every second token closes a pair
    assert reduction["fixed-pairs", "decode", 42] == pytest.approx(
        1 - np.mean([21, 22, 22, 23, 23]) / np.mean([42, 43, 44, 45, 46])
    )


def test_a_figure_above_the_roofline_ends_the_benchmark() -> None:
    with pytest.raises(EvaluationError, match="base prefill at 21 tokens must stay below"):
        measure(Roofline(1.0), prompt_lengths=(21,), new_tokens=2)


@pytest.mark.parametrize(("seconds", "refused"), [(2.0, False), (0.5, True), (0.0, True)])
def test_the_roofline_compares_work_per_second(seconds: float, refused: bool) -> None:
    ceiling = Roofline(100.0)
    if refused:
        with pytest.raises(EvaluationError, match="below the device's 100 FLOP/s"):
            ceiling.check("x", 100.0, seconds)
    else:
        assert ceiling.check("x", 100.0, seconds) == 50.0


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_work_is_counted_as_torch_counts_it(kind: str) -> None:
    backbone, units = tiny(kind), 24
    backbone.model.set_attn_implementation("eager")  # torch does not count its fused kernels on CPU
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hidden = backbone.hidden(torch.zeros(1, units, 16))
        backbone.head(hidden[:, -1])
    shape = ModelShape.of(backbone.model)
    # torch counts attention over the full square; the causal half of it is what must be done.
    square = 2.0 * shape.layers * shape.query_width * units * units
    assert shape.prefill_flops(units, units) + square == counter.get_total_flops()


def test_one_decode_step_costs_the_difference_of_two_prefills() -> None:
    shape = ModelShape(1000, 2, 16, 8, 50, 4)
    longer, shorter = shape.prefill_flops(31, 31), shape.prefill_flops(30, 30)
    head, self_attention = 2.0 * 50, 2.0 * 2 * 16  # the new unit's share of the causal triangle
    assert shape.decode_flops(30) == longer - shorter + head - self_attention


def test_prefill_bound_is_the_printed_formula() -> None:
    shape = ModelShape(1000, 2, 16, 8, 0, 4)
    a = 40 * 2 * 16 / 1000
    assert shape.prefill_bound(40, 10) == pytest.approx((1 + a) / (0.25 + a * 0.25**2))


def test_decode_bound_counts_weights_and_cache() -> None:
    shape = ModelShape(900, 2, 16, 8, 100, 4)
    weights, per_unit = 1000 * 4, 2 * 2 * 8 * 4
    expected = (weights + 3 * per_unit * 40) / (weights + 3 * per_unit * 10)
    assert shape.decode_bound(40, 10, 3) == pytest.approx(expected)


def test_fixed_pairs_close_on_every_second_generated_token() -> None:
    engine = Engine(MergedModel(tiny(), MergeModule(16), FixedPairs(), "compact"))
    run = time_run(engine, Prompts(IDS[None, :8]), 6)
    assert run.cache_lengths.tolist() == [[4, 5, 5, 6, 6, 7]]
    assert run.prefill > 0 and run.decode > 0


def test_a_request_is_prefill_and_decode(rows: list) -> None:
    for prefill, decode, request in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        assert request.base_seconds > max(prefill.base_seconds, decode.base_seconds)
        assert prefill.base_tokens_per_s * prefill.base_seconds == pytest.approx(
            2 * prefill.prompt_tokens
        )
        assert decode.umim_tokens_per_s * decode.umim_seconds == pytest.approx(2 * 4)
        assert request.umim_tokens_per_s * request.umim_seconds == pytest.approx(
            2 * (request.prompt_tokens + 5)
        )
        bounds = sorted([prefill.bound, decode.bound])
        assert bounds[0] <= request.bound <= bounds[1]


def test_key_value_bytes_are_those_of_the_units_held(rows: list) -> None:
    by_phase = {(r.rules, r.phase, r.prompt_tokens): r for r in rows}
    per_unit = 2 * 2 * 8 * 4  # keys and values, layers, width of 2 heads, float32
    prefill = by_phase["fixed-pairs", "prefill", 42]
    assert (prefill.base_kv_bytes, prefill.umim_kv_bytes) == (2 * 42 * per_unit, 2 * 21 * per_unit)
    request = by_phase["fixed-pairs", "request", 42]
    assert (request.base_kv_bytes, request.umim_kv_bytes) == (2 * 46 * per_unit, 2 * 23 * per_unit)


def test_every_batch_size_and_asked_reduction_is_measured() -> None:
    found = measure(prompt_lengths=(16,), batch_sizes=(1, 3), token_reductions=(0.25, 0.5))
    prefill = [row for row in found if (row.phase, row.rules) == ("prefill", "fixed-pairs")]
    assert [(r.batch_size, r.asked_reduction) for r in prefill] == [
        (1, 0.25),
        (1, 0.5),
        (3, 0.25),
        (3, 0.5),
    ]
    assert [r.token_reduction for r in prefill] == [0.25, 0.5, 0.25, 0.5]


@pytest.mark.parametrize("bound", [None, 0.0])
def test_a_given_text_is_generated_by_every_row_and_merged_by_all_rules(
    bound: float | None,
) -> None:
    rules = replace(NATURAL.rules, prices=np.ones(len(NATURAL.rules), np.float32))
    merged_model = MergedModel(
        tiny(), MergeModule(16), Matcher(rules), "compact", decode_max_damage=bound
    )
    prompts = cut_prompts(IDS, (2, 9, 8), 0, "text")
    run = time_run(Engine(merged_model), prompts, 8)
    for row, text in enumerate(prompts.text[:, :-1]):  # the last token is not fed
        starts = [len(NATURAL.segment(text[: n + 1])[0]) for n in range(7)]
        assert (run.cache_lengths[row, 1:] - run.cache_lengths[row, 0]).tolist() == starts
