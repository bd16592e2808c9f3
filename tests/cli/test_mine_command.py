"""``umim mine``: its options reach the miner, its figures are those of the rules it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from support.command_line import Result, Umim
from support.ngram_oracle import Grams, cut, grams_of, oracle
from umim_core.rules.grams import ORDERS
from umim_core.rules.ruleset import RuleSet

LENGTH = 20
SIZES = [900, 1100, 600, 400]
ALL = ("--overlap", "none", "--containment", "keep")
PLAIN = ("--segment-length", LENGTH, "--tau", 3, *ALL)


def stream() -> np.ndarray:
    return np.random.default_rng(8).integers(1, 16, sum(SIZES))


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four text files, all their ids in one array, and a directory."""
    monkeypatch.chdir(tmp_path)
    for number, ids in enumerate(np.split(stream(), np.cumsum(SIZES)[:-1])):
        (tmp_path / f"{number}.txt").write_text(" ".join(f"w{i}" for i in ids))
    np.save(tmp_path / "ids.npy", stream().astype(np.uint16))
    (tmp_path / "old").mkdir()
    return tmp_path


def mine(umim: Umim, tokenizer: Path, *options: object) -> Result:
    return umim("mine", "*.txt", "--tokenizer", tokenizer, *PLAIN, *options)


def written(name: str = "out") -> Grams:
    return grams_of(RuleSet.load(name))


def frequent(tau: int, excluded: frozenset[int] = frozenset(), longest: int = 4) -> Grams:
    return oracle(cut(stream(), LENGTH), tau, excluded, longest)


def per_order(rules: Grams) -> dict[str, int]:
    return {str(n): sum(len(span) == n for span in rules) for n in ORDERS}


def test_rules_of_text_and_their_figures(umim: Umim, corpus: Path, tokenizer_folder: Path) -> None:
    result = mine(umim, tokenizer_folder, "--out", "out", "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert written() == frequent(3)
    assert document["raw"] == document["rules"] == per_order(frequent(3))
    assert document["tokens"] == sum(SIZES)


def test_skipped_rows_are_told(umim: Umim, corpus: Path, tokenizer_folder: Path) -> None:
    row = json.dumps({"text": Path("0.txt").read_text()})
    Path("rows.jsonl").write_text(f'{row}\n{{"text": 1}}\n[]\n{row}\n')
    options = ("--tokenizer", tokenizer_folder, *PLAIN, "--out", "out")
    result = umim("mine", "rows.jsonl", *options, "--max-bad", 5)
    assert result.code == 0, result.err
    assert re.search(r"unusable rows skipped: 2, the first: rows.jsonl:2", result.err)
    assert re.search(r"umim train \S+ rows.jsonl --rules out --max-bad 5 --steps", result.out)


def test_options_reach_the_miner(umim: Umim, corpus: Path, tokenizer_folder: Path) -> None:
    protected = ("--protect", "w1$", "--protect", "2")
    how = ("--out", "out", "--rule-budget", 50, "--longest", 6)
    result = mine(umim, tokenizer_folder, *how, *protected, "--json")
    document = json.loads(result.out)
    assert document["tau"] > 3 and sum(document["rules"].values()) <= 50
    assert written() == frequent(document["tau"], frozenset({1, 2, 12}), 6)
    made = RuleSet.load("out").options
    assert (made.longest, made.segment_length) == (6, LENGTH)
    assert (made.overlap, made.containment) == ("none", "keep")
