"""``umim demo``: four parts with figures of this moment, for people and as one document."""

from __future__ import annotations

import json
import math
import re

import pytest

from support.command_line import Umim, console


@pytest.fixture
def umim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Umim:
    return console(monkeypatch, capsys)


def test_the_four_parts_are_printed_with_their_figures(umim: Umim) -> None:
    found = umim("demo", "-c", "umim-docs-llama")
    assert found.code == 0, found.err
    assert [int(n) for n in re.findall(r"^(\d)\. ", found.out, re.MULTILINE)] == [1, 2, 3, 4]
    assert "[ at a time,]" in found.out  # a merged span, where there are no colours
    assert re.search(r"base [\d,]+ ms, UMIM [\d,]+ ms with [\d.]+% of the tokens", found.out)
    assert "docstrings, window 2" in found.out
    assert max(map(len, found.out.splitlines())) <= 100


def test_a_prompt_fits_the_backbones_positions(umim: Umim) -> None:
    found = umim("demo", "-c", "umim-docs-gpt2")  # 1,024 positions
    assert found.code == 0, found.err
    assert "3. Prefill of 1,023 tokens" in found.out


@pytest.mark.full
def test_the_document_holds_what_was_measured(umim: Umim) -> None:
    document = json.loads(umim("demo", "-c", "umim-docs-llama", "--json").out)
    assert document["checkpoint"] == "umim-docs-llama"
    assert document["prefill"]["prompt_tokens"] == 1024
    assert document["prefill"]["base_seconds"] > 0 < document["prefill"]["umim_seconds"]
    assert [score["tokens"] for score in document["scores"][:2]] == [512, 512]
    for score in document["scores"]:
        assert 1 < score["ppl_base"] < score["ppl_umim"] < math.inf
