"""``umim ppl``: windows, documents and sources, and both models in one table."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from support.command_line import Umim, document
from umim_core import UMIM
from umim_core.checkpoint.checkpoint import Checkpoint

TEXT = "w1 w2 w9 w3 w4 w5 w6 w7 w8 w9 w1"


def test_ppl_agrees_with_the_library(umim: Umim, tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    called = ("ppl", tmp_path / "*.txt", "-c", tiny_checkpoint, "--dtype", "float32")
    found = document(umim(*called, "--json"))
    model = UMIM.from_pretrained(tiny_checkpoint, dtype="float32")
    assert found["ppl_base"] == pytest.approx(model.perplexity(TEXT, merge="none"), rel=1e-5)
    assert found["ppl_umim"] == pytest.approx(model.perplexity(TEXT), rel=1e-5)
    assert (found["targets"], found["windows"]) == (10, 1)
    assert found["token_reduction"] == pytest.approx(6 / 11)


def test_ppl_prints_both_models_in_one_table(
    umim: Umim, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    result = umim("ppl", tmp_path / "a.txt", "-c", tiny_checkpoint)
    head, base, ours, foot = result.out.splitlines()
    assert head.split() == ["token", "PPL", "bits/byte", "TR"]
    assert (base.split()[0], base.split()[-1], ours.split()[-1]) == ("base", "0.0%", "54.5%")
    assert "10 tokens" in foot and "1 windows of at most 512 tokens, 0 of context" in foot


def test_prompts_are_merged_as_generate_merges_them(
    umim: Umim, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("w1 w2 w3 w4 w5 w1 w2 w9 w3 w4 w5 w6")
    Checkpoint.load(tiny_checkpoint).recommending("prompt", 2).save(tmp_path / "tail")
    called = ("ppl", tmp_path / "a.txt", "-c", tmp_path / "tail", "--prompt")
    found = document(umim(*called, "--json"))
    assert (found["merge"], found["raw_tail"], found["targets"]) == ("prompt", 2, 6)
    # w1 w2 and w3 w4 of the first half lie before its raw tail, w5 w1
    assert found["token_reduction"] == pytest.approx(1 / 6)
    raw = document(umim(*called, "--raw-tail", "0", "--json"))
    assert raw["token_reduction"] == pytest.approx(3 / 6)
    assert raw["ppl_base"] == found["ppl_base"] and raw["ppl_umim"] != found["ppl_umim"]
    nats = found["targets"] * math.log(found["ppl_base"])
    assert found["bits_per_byte_base"] == pytest.approx(nats / math.log(2) / found["bytes"])
    assert "raw tail 2" in umim(*called).out
