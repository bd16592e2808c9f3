from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from benchmarks.common import Report, facts
from benchmarks.engine_sides import random_subject
from benchmarks.perplexity import equal, gates, main, measure, rule_sets
from docs.make.results import benchmark_page
from support.tiny_models import tiny_config

LENGTH, ROWS = 48, 2


@pytest.fixture(scope="module")
def report() -> Report:
    config = tiny_config(vocab_size=500, initializer_range=0.02)
    text = ROWS * LENGTH
    given = random_subject(config, text + 20_000, dtype="float32", device="cpu", mined=20_000)
    rules = rule_sets(given, given.ids[text:])
    rows = list(given.ids[:text].reshape(ROWS, LENGTH))
    found: Report = {
        "benchmark": "perplexity",
        "facts": facts(("torch",), "abc"),
        "device": "cpu",
        "length": 512,  # the listing's gate is judged
        "rows": ROWS,
        "backbones": {"tiny": measure(given, rules, rows, 1)},
    }
    found["gates"] = gates(found)
    found["equal"] = equal(found)
    return found


def test_one_forward_gives_what_the_listing_gives(report: Report) -> None:
    measured = report["backbones"]["tiny"]
    assert report["equal"]
    assert measured["plain"]["infix_free"] and not measured["nested"]["infix_free"]
    assert min(measured[name]["token_reduction"] for name in ("plain", "nested")) > 0.1


def test_gates_can_fail_and_short_rows_have_none_for_the_listing(report: Report) -> None:
    slow = copy.deepcopy(report)
    for name, times in (("plain", 1.31), ("nested", 1.51)):
        slow["backbones"]["tiny"][name]["times_base"]["median"] = times
        slow["backbones"]["tiny"][name]["listing_times"]["median"] = 19.9
    assert len(gates(slow)) == 4 and not any(passed for _, _, passed in gates(slow).values())
    assert not any("listing" in name for name in gates(slow | {"length": 128}))


@pytest.mark.full
def test_a_small_run_is_written_down(tmp_path: Path) -> None:
    out, sizes = tmp_path / "perplexity.json", ["--length", "32", "--rows", "1", "--pairs", "1"]
    main(["--backbones", "umim-docs-llama", "--out", str(out), *sizes])
    found = json.loads(out.read_text("utf-8"))
    assert list(found["backbones"]) == ["umim-docs-llama"] and found["equal"]
    assert out.with_suffix(".md").read_text("utf-8") == benchmark_page(found)
