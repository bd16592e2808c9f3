"""The benchmark of the engine on a real model: cases, text, gates, and what a second call does."""

from __future__ import annotations

import argparse
import copy
import gzip
import json
from pathlib import Path

import pytest

from benchmarks.common import Report, facts, go_on
from benchmarks.engine_sides import random_subject
from benchmarks.engine_smollm2 import (
    equal,
    gates,
    general_text,
    measure_case,
    pairs_of,
    settings_of,
)
from docs.make.results import benchmark_page
from support.tiny_models import tiny_config
from umim_core import UMIM
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.rules.ruleset import RuleSet

OPTIONS = argparse.Namespace(
    new_tokens=4, pairs=2, tokens_per_side=64, compared_tokens=32, lengths=[32, 64]
)


@pytest.fixture(scope="module")
def report() -> Report:
    config = tiny_config(vocab_size=500, max_position_embeddings=256, initializer_range=0.02)
    given = random_subject(config, 400, dtype="float32", device="cpu", mined=40_000)
    shapes = {"float32, 1 x 32": (1, 32), "float32, 2 x 64": (2, 64)}
    found: Report = {
        "benchmark": "engine_smollm2",
        "facts": facts(("torch",), "abc"),
        "settings": {"checkpoint": "tiny", "new_tokens": 4},
        "subject": {"backbone": "tiny-llama", "rules": 1234, "text": "phrases"},
        "cases": {name: measure_case(given, *shape, OPTIONS) for name, shape in shapes.items()},
    }
    return found | {"gates": gates(found), "equal": equal(found)}


@pytest.mark.parametrize(("tokens", "pairs"), [(4, 10), (16, 4), (64, 3)])
def test_long_prompts_get_fewer_pairs(tokens: int, pairs: int) -> None:
    assert pairs_of(argparse.Namespace(pairs=10, tokens_per_side=64), tokens) == pairs


def test_every_gate_of_a_case_is_judged(report: Report) -> None:
    every = ("prefill of bound", "decode", "merging share")
    first = {f"float32, 1 x 32, {gate}" for gate in (*every, "against transformers", "logits")}
    assert set(report["gates"]) == first | {f"float32, 2 x 64, {gate}" for gate in every}
    assert report["equal"]


def test_worse_figures_fail_their_gates(report: Report) -> None:
    worse = copy.deepcopy(report)
    for case in worse["cases"].values():
        case["phases"]["prefill"]["speedup"] = case["phases"]["decode"]["speedup"] = 0.5
        case["merging"]["share"] = 0.04
    first = worse["cases"]["float32, 1 x 32"]
    first["logits_error"] = 1e-7
    first["against_transformers"]["times_ours"]["median"] = 0.9
    assert not any(passed for _, _, passed in gates(worse).values())
    assert not equal(worse)


def test_other_ids_are_not_equal(report: Report) -> None:
    other = copy.deepcopy(report)
    other["cases"]["float32, 1 x 32"]["against_transformers"]["equal"] = False
    assert not equal(other)


def test_the_parts_of_a_prefill_are_those_of_fewer_units(report: Report) -> None:
    parts = report["cases"]["float32, 1 x 32"]["parts"]
    reduction = report["cases"]["float32, 1 x 32"]["phases"]["prefill"]["token_reduction"]
    assert parts["matrix products"]["base"] > 0 and parts["attention"]["umim"] > 0
    assert parts["attention"]["ideal"] == pytest.approx(parts["matrix products"]["ideal"] ** 2)
    assert (reduction > 0) == (parts["matrix products"]["ideal"] > 1)


def test_the_page_shows_every_case_and_every_gate(report: Report) -> None:
    page = benchmark_page(report)
    for text in ("| float32, 2 x 64 ", "1 x 32: attention", "tiny on tiny-llama, 1,234 rules"):
        assert text in page
    assert page.count("\n| ") > len(report["gates"]) + 8


def test_a_second_call_goes_on_with_the_same_settings_only(report: Report, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text(json.dumps(report), "utf-8")
    fresh = {name: report[name] for name in ("benchmark", "facts", "settings")}
    same, other = fresh | {"cases": {}}, fresh | {"cases": {}, "settings": {"new_tokens": 5}}
    go_on(same, out, ["settings"], ["subject", "cases"])
    go_on(other, out, ["settings"], ["subject", "cases"])
    assert same["cases"].keys() == report["cases"].keys() and other["cases"] == {}


@pytest.mark.parametrize(
    "changed",
    ["", "module", "rules", "unit_positions", "backbone", "text", "new_tokens", "commit"],
)
def test_cases_of_another_input_are_measured_anew(
    changed: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "text").mkdir()
    text = tmp_path / "text" / "a-test.jsonl.gz"
    text.write_bytes(b"one")
    options = argparse.Namespace(**vars(OPTIONS), checkpoint=str(tiny_checkpoint))
    facts = {"commit": None if changed == "commit" else "abc"}
    before = {"benchmark": "x", "facts": facts, "settings": settings_of(options, text.parent)}
    out = tmp_path / "out.json"
    out.write_text(json.dumps(before | {"subject": {}, "cases": {"one": 1}}), "utf-8")

    checkpoint = Checkpoint.load(tiny_checkpoint)
    config, module, rules = checkpoint.config, checkpoint.module, checkpoint.rules
    if changed == "module":
        next(module.parameters()).data.mul_(2)
    elif changed == "rules":
        origin = config.tokenizer_fingerprint
        rules = RuleSet.from_spans([(1, 2)], tokenizer_fingerprint=origin)
    elif changed == "unit_positions":
        config = config.model_copy(update={"unit_positions": "preserved"})
    elif changed == "backbone":
        config = config.model_copy(update={"backbone_fingerprint": "0" * 64})
    elif changed == "text":
        text.write_bytes(b"two")
    elif changed == "new_tokens":
        options.new_tokens += 1
    options.checkpoint = str(tmp_path / tiny_checkpoint.name)  # the same name
    Checkpoint(config, module, rules).save(options.checkpoint)
    now = before | {"settings": settings_of(options, text.parent), "cases": {}}
    go_on(now, out, ["settings"], ["subject", "cases"])
    assert now["cases"] == ({} if changed else {"one": 1})


def test_the_text_takes_passages_of_all_kinds_in_turn(tiny_umim: UMIM, tmp_path: Path) -> None:
    for kind, word in (("a", "w1"), ("b", "w2")):
        with gzip.open(tmp_path / f"{kind}-test.jsonl.gz", "wt") as file:
            file.write(json.dumps({"text": " ".join([word] * 70)}) + "\n")
    name, ids = general_text(tiny_umim, 200, tmp_path)
    first, second = (tiny_umim.backbone.encode(word)[0] for word in ("w1", "w2"))
    assert ids.tolist() == ([first] * 64 + [second] * 64) * 2
    assert "(a, b)" in name
