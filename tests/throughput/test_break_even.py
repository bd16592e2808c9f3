"""From where on merging pays, against tables read by eye."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from umim_core.throughput.break_even import (
    Phase,
    ThroughputRow,
    break_even,
    break_even_markdown,
    least_reduction,
    pays_from,
)

LENGTHS = (256, 512, 1024)


def row(
    length: int, low: float, asked: float | None = 0.5, phase: Phase = "prefill", batch: int = 1
) -> ThroughputRow:
    return ThroughputRow(
        phase=phase,
        rules="natural" if asked is None else "fixed-pairs",
        asked_reduction=asked,
        prompt_tokens=length,
        new_tokens=8,
        batch_size=batch,
        token_reduction=asked or 0.4,
        base_seconds=1.0,
        umim_seconds=1.0,
        base_tokens_per_s=1.0,
        umim_tokens_per_s=1.0,
        speedup=low + 0.05,
        speedup_low=low,
        speedup_high=low + 0.1,
        bound=2.0,
        pairs=4,
        base_flops_per_s=1.0,
        umim_flops_per_s=1.0,
        base_kv_bytes=2,
        umim_kv_bytes=1,
        base_peak_bytes=None,
        umim_peak_bytes=None,
    )


@pytest.mark.parametrize(
    ("lows", "start"),
    [
        ((1.1, 1.2, 1.3), 256),
        ((0.9, 1.2, 1.3), 512),
        ((1.1, 0.9, 1.3), 1024),  # a lucky cell is no break-even
        ((1.1, 1.2, 1.0), None),
    ],
)
def test_it_pays_from_where_all_longer_prompts_pay(
    lows: tuple[float, ...], start: int | None
) -> None:
    assert pays_from([row(n, low) for n, low in zip(LENGTHS, lows, strict=True)]) == start


def test_a_median_above_one_does_not_pay_alone() -> None:
    assert row(256, 0.97).speedup > 1.0
    assert pays_from([row(256, 0.97)]) is None


def test_phases_batch_sizes_and_rules_are_told_apart() -> None:
    rows = [row(256, 1.1), row(256, 0.9, phase="decode"), row(256, 1.1, batch=8)]
    rows += [row(256, 1.2, asked=None), row(512, 0.5, asked=None)]
    found = break_even(rows)
    assert [(b.phase, b.batch_size, b.rules, b.pays_from) for b in found] == [
        ("prefill", 1, "fixed-pairs", 256),
        ("prefill", 1, "natural", None),
        ("decode", 1, "fixed-pairs", None),
        ("prefill", 8, "fixed-pairs", 256),
    ]
    assert json.loads(json.dumps(asdict(found[1])))["speedups_low"] == [1.2, 0.5]


def test_the_least_reduction_is_that_from_which_all_larger_ones_pay() -> None:
    rows = [row(256, low, asked) for low, asked in ((1.1, 0.1), (0.9, 0.2), (1.2, 0.3), (1.5, 0.5))]
    assert least_reduction([*rows, row(256, 1.9, asked=None)]) == 0.3
    assert least_reduction([row(256, 0.8, 0.5)]) is None


def test_the_table_has_a_line_per_kind_and_a_column_per_length() -> None:
    rows = [row(n, 1.5, asked) for asked in (0.25, 0.5) for n in LENGTHS]
    rows[0] = row(256, 0.5, 0.25)
    lines = break_even_markdown(rows).splitlines()
    assert "| rules | TR | 256 | 512 | 1,024 | pays from |" in lines
    assert (
        "| pairs 25 % | 25.0% | 0.55 (0.50-0.60) | **1.55** (1.50-1.60) | **1.55** (1.50-1.60) "
        "| 512 |" in lines
    )
    assert "| pairs pay from TR |  | 50.0% | 25.0% | 25.0% |  |" in lines
