"""Structure of the throughput rows, the bounds, and the roofline that refuses impossible ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from umim_core.backbone import Backbone, wrap_backbone
from umim_core.benchmarking.pairs import FixedPairs
from umim_core.benchmarking.roofline import ModelShape, Roofline, measure_peak
from umim_core.benchmarking.throughput import measure_throughput, time_run
from umim_core.errors import ConfigError, EvaluationError
from umim_core.merging.engine import Engine
from umim_core.merging.module import MergeModule
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

IDS = np.arange(200, dtype=np.int64) % 7 + 1
NATURAL = Matcher(RuleSet.from_spans([(1, 2), (4, 5, 6)]))  # the ids repeat 1 .. 7


def tiny(kind: str = "llama") -> Backbone:
    torch.manual_seed(0)
    if kind == "llama":
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
        )
        return wrap_backbone(LlamaForCausalLM(config), None)
    config = GPT2Config(
        vocab_size=32,
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_positions=128,
        bos_token_id=0,
        eos_token_id=0,
    )
    return wrap_backbone(GPT2LMHeadModel(config), None)


@pytest.fixture(scope="module")
def rows() -> list:
    return measure_throughput(
        tiny(),
        MergeModule(16),
        NATURAL,
        IDS,
        prompt_lengths=(21, 42),
        new_tokens=5,
        batch_size=2,
        warmup=0,
        pairs=3,
        roofline=Roofline(1e30),
    )


def test_rows_cover_every_length_kind_and_phase(rows: list) -> None:
    assert [(r.prompt_tokens, r.rules, r.phase) for r in rows] == [
        (length, rules, phase)
        for length in (21, 42)
        for rules in ("fixed-pairs", "natural")
        for phase in ("prefill", "decode")
    ]
    assert {(r.batch_size, r.new_tokens, r.pairs) for r in rows} == {(2, 5, 3)}


def test_token_reduction_is_the_realised_one(rows: list) -> None:
    reduction = {(r.rules, r.phase, r.prompt_tokens): r.token_reduction for r in rows}
    assert reduction["fixed-pairs", "prefill", 42] == 0.5
    assert reduction["fixed-pairs", "prefill", 21] == pytest.approx(10 / 21)  # one token is left
    assert reduction["natural", "prefill", 42] == pytest.approx(3 / 7)  # 7 tokens become 4 units
    # 21 units after the prompt; then every second token closes a pair
    assert reduction["fixed-pairs", "decode", 42] == pytest.approx(
        1 - np.mean([21, 22, 22, 23, 23]) / np.mean([42, 43, 44, 45, 46])
    )


def test_rows_are_consistent_and_json(rows: list) -> None:
    for row in rows:
        assert row.base_tokens_per_s > 0 and row.umim_tokens_per_s > 0
        assert row.speedup_low <= row.speedup <= row.speedup_high
        assert row.bound >= 1.0
        assert json.loads(json.dumps(row.as_dict())) == row.as_dict()


def test_a_figure_above_the_roofline_ends_the_benchmark() -> None:
    with pytest.raises(EvaluationError, match="base prefill at 21 tokens must stay below"):
        measure_throughput(
            tiny(), MergeModule(16), NATURAL, IDS, prompt_lengths=(21,), new_tokens=2, warmup=0,
            pairs=1, roofline=Roofline(1.0),
        )  # fmt: skip


@pytest.mark.parametrize(("seconds", "refused"), [(2.0, False), (0.5, True), (0.0, True)])
def test_the_roofline_compares_work_per_second(seconds: float, refused: bool) -> None:
    ceiling = Roofline(100.0)
    if refused:
        with pytest.raises(EvaluationError, match="below the device's 100 FLOP/s"):
            ceiling.check("x", 100.0, seconds)
    else:
        assert ceiling.check("x", 100.0, seconds) == 50.0


def test_the_measured_peak_is_a_plausible_number_of_flops() -> None:
    assert 1e8 < measure_peak(torch.device("cpu"), torch.float32).peak_flops < 1e15


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
    assert shape.prefill_flops(units) + square == counter.get_total_flops()


def test_one_decode_step_costs_the_difference_of_two_prefills() -> None:
    shape = ModelShape(1000, 2, 16, 8, 50, 4)
    longer, shorter = shape.prefill_flops(31), shape.prefill_flops(30)
    head, self_attention = 2.0 * 50, 2.0 * 2 * 16  # the new unit's share of the causal triangle
    assert shape.decode_flops(30) == longer - shorter + head - self_attention


def test_the_speed_up_is_umim_over_base() -> None:
    rows = measure_throughput(
        tiny(), MergeModule(16), NATURAL, IDS, prompt_lengths=(42,), new_tokens=3, warmup=0,
        pairs=1, roofline=Roofline(1e30),
    )  # fmt: skip
    for row in rows:
        assert row.speedup == pytest.approx(row.umim_tokens_per_s / row.base_tokens_per_s)


def test_prefill_bound_is_the_printed_formula() -> None:
    shape = ModelShape(1000, 2, 16, 8, 0, 4)
    a = 40 * 2 * 16 / 1000
    assert shape.prefill_bound(40, 10) == pytest.approx((1 + a) / (0.25 + a * 0.25**2))


def test_decode_bound_counts_weights_and_cache() -> None:
    shape = ModelShape(900, 2, 16, 8, 100, 4)
    weights, per_unit = 1000 * 4, 2 * 2 * 8 * 4
    expected = (weights + 3 * per_unit * 40) / (weights + 3 * per_unit * 10)
    assert shape.decode_bound(40, 10, 3) == pytest.approx(expected)


def test_fixed_pairs_cover_an_odd_sequence() -> None:
    starts, lengths = FixedPairs().segment(np.array([7, 8, 9]))
    assert (starts.tolist(), lengths.tolist()) == ([0, 2], [2, 1])


def test_fixed_pairs_of_many_sequences_equal_those_of_each() -> None:
    offsets = np.array([0, 3, 3, 7], dtype=np.int64)
    starts, lengths, borders = FixedPairs().segment_many(np.arange(7), offsets)
    assert starts.tolist() == [0, 2, 3, 5]
    assert lengths.tolist() == [2, 1, 2, 2]
    assert borders.tolist() == [0, 2, 2, 4]


def test_fixed_pairs_close_on_every_second_generated_token() -> None:
    run = time_run(Engine(tiny(), MergeModule(16), FixedPairs()), [IDS[:8]], 6)
    assert run.output.rows[0].cache_lengths == (4, 5, 5, 6, 6, 7)
    assert run.prefill > 0 and run.decode > 0


@pytest.mark.parametrize(
    "wrong", [{"new_tokens": 1}, {"pairs": 0}, {"batch_size": 0}, {"prompt_lengths": (0,)}]
)
def test_sizes_out_of_range_are_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError, match="new_tokens must be at least 2"):
        measure_throughput(tiny(), MergeModule(16), NATURAL, IDS, **wrong)


def test_a_short_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="must hold 3 prompts of 100 tokens"):
        measure_throughput(
            tiny(), MergeModule(16), NATURAL, IDS, prompt_lengths=(100,), batch_size=3
        )
