"""Throughput: rows, bounds, the roofline, fixed pairs, and from where on merging pays."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from support.tiny_models import random_backbone
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.shape import BackboneShape
from umim_core.config.evaluate import BenchmarkConfig
from umim_core.errors import EvaluationError
from umim_core.inference.engine import Engine
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.throughput import throughput
from umim_core.throughput.break_even import Phase, ThroughputRow, break_even, pays_from
from umim_core.throughput.roofline import ForwardCost, Roofline
from umim_core.throughput.throughput import (
    FixedSpans,
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
        MergedModel(tiny(), MergeModule(16), NATURAL), IDS, config, roofline=roofline
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
    assert Roofline(100.0).check("x", 100.0, 2.0) == 50.0
    for seconds in (0.5, 0.0):
        with pytest.raises(EvaluationError, match="below the device's 100 FLOP/s"):
            Roofline(100.0).check("x", 100.0, seconds)


def test_a_peak_that_other_work_hid_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([1.0, 2.0, 3.0, 1e30])
    monkeypatch.setattr(throughput, "measure_peak", lambda *_: Roofline(next(peaks)))
    assert len(measure(None, prompt_lengths=(21,), new_tokens=2)) == 6
    monkeypatch.setattr(throughput, "measure_peak", lambda *_: Roofline(1.0))
    with pytest.raises(EvaluationError, match="must stay below the device's 1 FLOP/s"):
        measure(None, prompt_lengths=(21,), new_tokens=2)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_work_is_counted_as_torch_counts_it(kind: str) -> None:
    backbone, units = tiny(kind), 24
    backbone.model.set_attn_implementation("eager")  # torch does not count its fused kernels on CPU
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hidden = backbone.hidden(torch.zeros(1, units, 16))
        backbone.head(hidden[:, -1])
    cost = ForwardCost.of(MergedModel.without_merging(backbone))
    # torch counts attention over the full square; the causal half of it is what must be done.
    square = 2.0 * cost.shape.layers * cost.shape.query_width * units * units
    assert cost.prefill_flops(units, units) + square == counter.get_total_flops()


def test_costs_and_bounds_are_the_printed_formulas() -> None:
    sizes = {"hidden_size": 5, "intermediate_size": 20, "layers": 2, "heads": 2, "kv_heads": 1}
    shape = BackboneShape(**sizes, head_dim=8, vocab_size=10, tied=True, gated_mlp=True)
    assert shape.block_weights == 2 * 5 * (2 * (16 + 8) + 3 * 20) == 1080
    cost = ForwardCost(shape, weight_bytes=4)
    step = cost.prefill_flops(31, 31) - cost.prefill_flops(30, 30)
    head, self_attention = 2.0 * 50, 2.0 * 2 * 16  # the new unit's share of the causal triangle
    assert cost.decode_flops(30) == step + head - self_attention
    a, last = 40 * 2 * 16 / 1080, head / (2 * 1080 * 40)
    bound = (1 + a + last) / (0.25 + a * 0.25**2 + last)
    assert cost.prefill_bound(40, 10) == pytest.approx(bound)
    weights, per_unit = 1130 * 4, 2 * 2 * 8 * 4
    expected = (weights + 3 * per_unit * 40) / (weights + 3 * per_unit * 10)
    assert cost.decode_bound(40, 10, 3) == pytest.approx(expected)
    inside = replace(cost, raw_layers=1)  # half of the layers read and hold every token
    mean = (cost.prefill_flops(40, 40) + cost.prefill_flops(10, 10)) / 2
    assert inside.prefill_flops(10, 40) == mean and inside.columns(40, 10) == 25


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
    settings = [(batch, share) for batch in (1, 3) for share in (0.25, 0.5)]
    assert [(r.batch_size, r.asked_reduction) for r in prefill] == settings
    assert [r.token_reduction for r in prefill] == [share for _, share in settings]


@pytest.mark.parametrize("bound", [None, 0.0])
def test_a_given_text_is_generated_by_every_row_and_merged_by_all_rules(
    bound: float | None,
) -> None:
    rules = replace(NATURAL.rules, prices=np.ones(len(NATURAL.rules), np.float32))
    merged_model = MergedModel(tiny(), MergeModule(16), Matcher(rules), decode_max_damage=bound)
    prompts = cut_prompts(IDS, (2, 9, 8), 0, "text")
    run = time_run(Engine(merged_model), prompts, 8)
    for row, text in enumerate(prompts.text[:, :-1]):  # the last token is not fed
        starts = [len(NATURAL.segment(text[: n + 1])[0]) for n in range(7)]
        assert (run.cache_lengths[row, 1:] - run.cache_lengths[row, 0]).tolist() == starts


@pytest.mark.parametrize("reduction", [0.05, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75])
def test_spans_realise_the_reduction_while_reading_and_while_decoding(reduction: float) -> None:
    rules, text = FixedSpans(reduction), np.arange(400)
    starts, lengths = rules.segment(text)
    assert 1 - len(starts) / 400 == pytest.approx(reduction)
    assert np.array_equal(starts, np.cumsum(lengths) - lengths)
    if reduction == 0.25:  # every second pair
        assert starts[:7].tolist() == [0, 1, 2, 4, 5, 6, 8]
    suffixes, units = rules.suffixes(1), list[int]()
    for token in text[:41]:
        step = suffixes.advance(np.array([token]), np.array([True]))
        span = step.spans[0, : step.lengths[0]].tolist()
        assert span == list(range(token + 1 - len(span), token + 1))
        units[len(units) - step.rollback[0] :] = [len(span)]
    assert units == rules.segment(text[:41])[1].tolist()


LENGTHS = (256, 512, 1024)


def row(
    length: int, low: float, asked: float | None = 0.5, phase: Phase = "prefill", batch: int = 1
) -> ThroughputRow:
    figures: dict[str, Any] = dict.fromkeys((each.name for each in fields(ThroughputRow)), 1.0)
    figures |= {"rules": "natural" if asked is None else "fixed-pairs", "asked_reduction": asked}
    figures |= {"phase": phase, "prompt_tokens": length, "new_tokens": 8, "batch_size": batch}
    figures |= {"speedup": low + 0.05, "speedup_low": low, "speedup_high": low + 0.1}
    return ThroughputRow(**figures | {"token_reduction": asked or 0.4})


@pytest.mark.parametrize(
    ("lows", "start"),
    [
        ((1.1, 1.2, 1.3), 256),
        ((0.9, 1.2, 1.3), 512),
        ((1.1, 0.9, 1.3), 1024),  # a lucky cell is no break-even
        ((1.1, 1.2, 1.0), None),
        ((1.1, 1.2, 0.97), None),  # its median is above one
    ],
)
def test_it_pays_from_where_all_longer_prompts_pay(
    lows: tuple[float, ...], start: int | None
) -> None:
    assert pays_from([row(n, low) for n, low in zip(LENGTHS, lows, strict=True)]) == start


def test_what_merged_nothing_does_not_pay() -> None:
    assert pays_from([replace(row(256, 1.1), token_reduction=0.0)]) is None


def test_phases_batch_sizes_and_rules_are_told_apart() -> None:
    rows = [row(256, 1.1), row(256, 0.9, phase="decode"), row(256, 1.1, batch=8)]
    rows += [row(256, 1.2, asked=None), row(512, 0.5, asked=None)]
    found = break_even(rows)
    names = ("phase", "batch_size", "rules", "pays_from")
    assert [tuple(crossing[name] for name in names) for crossing in found] == [
        ("prefill", 1, "fixed-pairs", 256),
        ("prefill", 1, "natural", None),
        ("decode", 1, "fixed-pairs", None),
        ("prefill", 8, "fixed-pairs", 256),
    ]
    assert json.loads(json.dumps(found))[1]["speedups_low"] == [1.2, 0.5]
