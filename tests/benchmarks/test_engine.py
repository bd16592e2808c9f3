from __future__ import annotations

import copy

import numpy as np
import pytest

from benchmarks.common import Report, facts
from benchmarks.engine import equal, gates, measure
from benchmarks.engine_sides import (
    DYNAMIC,
    OURS,
    STATIC,
    Subject,
    generation_sides,
    logits_error,
    random_subject,
)
from support.tiny_models import tiny_config
from umim_core.config.evaluate import BenchmarkConfig
from umim_core.throughput.roofline import Roofline

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
