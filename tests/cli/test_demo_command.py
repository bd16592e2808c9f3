"""``umim demo``: two sides, three questions, figures of this moment, for people and programs."""

from __future__ import annotations

import json
import re

import pytest

from support.command_line import Umim
from umim_core.cli.demo_command import verdict as verdict_of
from umim_core.model_sources.model_cache import model_fault
from umim_core.model_sources.packaged_model import PACKAGED


def test_both_sides_answer_three_questions(umim: Umim) -> None:
    found = umim("demo", "-c", "umim-docs-gpt2", "--pairs", "1")  # 1,024 positions
    assert found.code == 0, found.err
    assert [int(n) for n in re.findall(r"^(\d)\. ", found.out, re.MULTILINE)] == [1, 2, 3]
    start = found.out.partition("... the first")[0]
    assert re.search(r"\[ \w+ \w+", start)  # a merged span, where there are no colours
    assert len(re.findall(r"^   (?:base|UMIM)  first token after", found.out, re.MULTILINE)) == 6
    verdicts = r"\[(?:the same answer|other words, both right|DIFFERENT: [\w ]+)\]"
    assert len(re.findall(verdicts, found.out)) == 3
    assert re.search(r"its KV cache +[\d.]+ MiB +[\d.]+ MiB", found.out)
    assert re.search(
        r"[\d.]+ times as fast \([\d.]+ to [\d.]+ in 1 pairs; [\d.]+ is the", found.out
    )
    assert "; merge prompt, raw tail 16" in found.out


def test_the_document_holds_what_was_measured(umim: Umim) -> None:
    found = json.loads(umim("demo", "-c", "umim-docs-llama", "--pairs", "1", "--json").out)
    read = found["reading"]
    kept = read["base_kv_bytes"] * (1 - read["token_reduction"])
    assert read["tokens"] > 1000 and read["umim_kv_bytes"] == pytest.approx(kept)
    assert read["bound"] > 1 and read["speedup_low"] <= read["speedup"] <= read["speedup_high"]
    for answer in found["answers"]:
        assert (answer["verdict"] == "the same answer") is (answer["base"] == answer["umim"])


@pytest.mark.parametrize(
    ("base", "umim_says", "verdict"),
    [
        ("Red.", "Red.", "the same answer"),
        ("Red.", "It is red.", "other words, both right"),
        ("Red.", "Blue.", "DIFFERENT: UMIM is wrong"),
        ("Blue.", "Red.", "DIFFERENT: the base model is wrong"),
        ("Blue.", "Green.", "DIFFERENT: both are wrong"),
    ],
)
def test_answers_are_compared(base: str, umim_says: str, verdict: str) -> None:
    assert verdict_of(base, umim_says, "red") == verdict


@pytest.mark.full
def test_the_default_checkpoint_answers_rightly(umim: Umim) -> None:
    if fault := model_fault(PACKAGED["smollm2-135m-instruct"]):
        pytest.skip(str(fault))
    found = json.loads(umim("demo", "--pairs", "1", "--json").out)
    verdicts = {answer["verdict"] for answer in found["answers"]}
    assert verdicts <= {"the same answer", "other words, both right"}
