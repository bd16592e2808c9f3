"""The benchmark of the engine: its sides agree, and its gates can fail."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common import Report, facts
from benchmarks.engine import equal, gates, measure
from benchmarks.engine_sides import (
    DYNAMIC,
    OURS,
    STATIC,
    Subject,
    general_text,
    generation_sides,
    logits_error,
    phrase_text,
    random_subject,
)
from docs.make.results import benchmark_page
from support.tiny_models import tiny_config
from umim_core import UMIM
from umim_core.benchmarking.roofline import Roofline
from umim_core.config.benchmark import BenchmarkConfig

PROTOCOL = BenchmarkConfig(
    prompt_lengths=(512,), new_tokens=4, warmup=0, pairs=1, batch_sizes=(1, 2)
)


@pytest.fixture(scope="module")
def tiny() -> Subject:
    config = tiny_config(vocab_size=500, max_position_embeddings=1024, initializer_range=0.02)
    return random_subject(config, 1100, dtype="float32", device="cpu", mined=40_000)


@pytest.fixture(scope="module")
def report(tiny: Subject) -> Report:
    found: Report = {
        "benchmark": "engine",
        "facts": facts(("torch",), "abc"),
        "device": "cpu",
        "dtype": "float32",
        "new_tokens": 4,
        "backbones": {"tiny": measure(tiny, PROTOCOL, Roofline(1e30))},
    }
    found["gates"] = gates(found)
    found["equal"] = equal(found)
    return found


@pytest.mark.parametrize("rows", [1, 3])
def test_all_engines_generate_the_same_ids(tiny: Subject, rows: int) -> None:
    sides = generation_sides(tiny.backbone, tiny.ids[: 20 * rows].reshape(rows, 20), 6)
    assert list(sides) == [OURS, DYNAMIC, STATIC]
    ids = [side() for side in sides.values()]
    assert np.array(ids).shape == (3, rows, 6)
    assert ids[0] == ids[1] == ids[2]


def test_an_empty_rule_set_changes_no_bit_of_the_logits(tiny: Subject) -> None:
    assert logits_error(tiny, tiny.ids[None, :30], 5) == 0.0


def test_random_text_holds_rules_as_text_does(tiny: Subject) -> None:
    starts, _ = tiny.compressed.segment(tiny.ids)
    assert 0.15 < 1 - len(starts) / len(tiny.ids) < 0.6


def test_the_text_repeats_itself_exactly() -> None:
    text = phrase_text(300, 500)
    assert np.array_equal(text, phrase_text(300, 500))
    assert 0 <= text.min() <= text.max() < 500


def test_every_gate_of_a_backbone_is_judged(report: Report) -> None:
    assert set(report["gates"]) == {
        f"tiny_b{batch}_{gate}"
        for batch in (1, 2)
        for gate in (
            "against_transformers_dynamic_cache",
            "against_transformers_static_cache",
            "512_fixed-pairs_prefill_of_bound",
            "512_fixed-pairs_decode",
            "512_natural_prefill_of_bound",
            "512_natural_decode",
            "512_merging_share",
            "logits",
        )
    }
    assert report["equal"]


def test_worse_figures_fail_their_gates(report: Report) -> None:
    worse = copy.deepcopy(report)
    measured = worse["backbones"]["tiny"]
    for row in measured["rows"]:
        row["speedup"] = 0.5
    for part in measured["merging"]:
        part["share"] = 0.04
    measured["logits_error"] = {"1": 1e-7, "2": 2e-5}
    for sides in measured["engines"].values():
        for values in sides.values():
            values["times_ours"]["median"] = 0.9
    assert not any(passed for _, _, passed in gates(worse).values())
    assert not equal(worse)


def test_other_ids_are_not_equal_in_float32_where_no_sum_rounds_differently(
    report: Report,
) -> None:
    other = copy.deepcopy(report)
    other["backbones"]["tiny"]["engines"]["2"][STATIC]["equal"] = False
    assert not equal(other)
    half = other | {"dtype": "bfloat16"}
    assert equal(half) and set(gates(other)) - set(gates(half)) == {
        "tiny_b1_logits",
        "tiny_b2_logits",
    }


def test_general_text_takes_passages_of_all_kinds_in_turn(tiny_umim: UMIM, tmp_path: Path) -> None:
    for kind, word in (("a", "w1"), ("b", "w2")):
        with gzip.open(tmp_path / f"{kind}-test.jsonl.gz", "wt") as file:
            file.write(json.dumps({"text": " ".join([word] * 70)}) + "\n")
    name, ids = general_text(tiny_umim, 200, tmp_path)
    first, second = (tiny_umim.backbone.encode(word)[0] for word in ("w1", "w2"))
    assert ids.tolist() == ([first] * 64 + [second] * 64) * 2
    assert "(a, b)" in name


def test_the_page_shows_every_side_and_every_gate(report: Report) -> None:
    page = benchmark_page(report)
    for name in (f"tiny, 2 x 512: {STATIC}", "natural", "request", "merging share", "pays from"):
        assert name in page
    assert page.count("\n| ") > len(report["gates"])
