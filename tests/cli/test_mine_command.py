"""``umim mine``: its options reach the miner, its figures are those of the rules it writes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from support.command_line import Result, Umim
from support.ngram_oracle import Grams, cut, grams_of, oracle
from support.processes import output_of
from umim_core.rules.grams import ORDERS
from umim_core.rules.ruleset import RuleSet

LENGTH = 20
SIZES = [900, 1100, 600, 400]
ALL = ("--overlap", "none", "--containment", "keep")
PLAIN = ("--segment-length", LENGTH, "--tau", 3, *ALL)


@pytest.fixture(scope="module")
def tokenizer(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast
) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer.save_pretrained(folder)
    return folder


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


def frequent(tau: int, excluded: frozenset[int] = frozenset()) -> Grams:
    return oracle(cut(stream(), LENGTH), tau, excluded)


def per_order(rules: Grams) -> dict[str, int]:
    return {str(n): sum(len(span) == n for span in rules) for n in ORDERS}


def test_rules_of_text_and_their_figures(umim: Umim, corpus: Path, tokenizer: Path) -> None:
    result = mine(umim, tokenizer, "--out", "out", "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert written() == frequent(3)
    assert document["raw"] == document["rules"] == per_order(frequent(3))
    assert document["tokens"] == sum(SIZES)


def test_filters_are_on_unless_they_are_switched_off(
    umim: Umim, corpus: Path, tokenizer: Path
) -> None:
    options = ("--segment-length", LENGTH, "--tau", 3, "--out", "out", "--json")
    document = json.loads(umim("mine", "ids.npy", *options).out)
    raw, left, kept = (sum(document[name].values()) for name in ("raw", "overlap", "rules"))
    assert raw > left > kept == len(written())
    assert document["raw"] == per_order(frequent(3))
    assert RuleSet.load("out").origin.tokenizer_fingerprint is None


@pytest.mark.full  # within this process: test_rules_of_text_and_their_figures
def test_json_is_alone_on_stdout_of_a_real_process(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([1, 2, 3] * 40, np.uint16))
    entry = [sys.executable, "-c", "from umim_core.cli.app import main; main()"]
    options = ["--out", "out", "--segment-length", "60", "--json"]
    document = json.loads(output_of(*entry, "mine", "ids.npy", *options, cwd=tmp_path))
    assert document["rules"] == {"2": 0, "3": 0, "4": 1}
    assert document["out"] == "out"


def test_a_budget_raises_tau_and_both_are_told(umim: Umim, corpus: Path, tokenizer: Path) -> None:
    result = mine(umim, tokenizer, "--out", "out", "--rule-budget", 50, "--json")
    document = json.loads(result.out)
    assert document["tau"] > 3
    assert sum(document["rules"].values()) == len(written()) <= 50
    assert written() == frequent(document["tau"])
    assert len(frequent(document["tau"] - 1)) > 50


def test_protected_tokens_may_be_given_several_times(
    umim: Umim, corpus: Path, tokenizer: Path
) -> None:
    result = mine(umim, tokenizer, "--out", "out", "--protect", "w1$", "--protect", "2")
    assert result.code == 0, result.err
    assert written() == frequent(3, frozenset({1, 2, 12}))


def test_skipped_rows_are_told(umim: Umim, corpus: Path, tokenizer: Path) -> None:
    row = json.dumps({"text": Path("0.txt").read_text()})
    Path("rows.jsonl").write_text(f'{row}\n{{"text": 1}}\n[]\n{row}\n')
    options = ("--tokenizer", tokenizer, *PLAIN, "--out", "out")
    result = umim("mine", "rows.jsonl", *options, "--max-bad", 5)
    assert result.code == 0, result.err
    assert re.search(r"unusable rows skipped: 2, the first: rows.jsonl:2", result.err)
    assert re.search(r"umim train \S+ rows.jsonl --rules out --max-bad 5 --steps", result.out)


TEXT = ("mine", "0.txt", "--tokenizer", "TOKENIZER", "--out", "new")
IDS = ("mine", "ids.npy", "--out", "new", *PLAIN)
ERRORS = {
    "out exists": ((*TEXT[:-1], "old"), "the output directory must not exist; got old"),
    "file": (("mine", "no.txt", *TEXT[2:]), "a corpus file must exist; got no.txt"),
    "no tokenizer": (("mine", "0.txt", "--out", "new"), "text needs a tokenizer; got none"),
    "tau": ((*TEXT, "--tau", "0"), "tau must be at least 1; got 0"),
    "segment": ((*TEXT, "--segment-length", "1"), "segment_length must be at least 2; got 1"),
    "no out": (("mine", "ids.npy"), "--out must name the rule directory to write; got nothing"),
    "memory": ((*IDS, "--max-memory-gib", "0.0001"), "mining must take at most 0.0001 GiB of mem"),
    "pattern": ((*TEXT, "--protect", "("), "a protected pattern must be a regular expression or"),
    "backbone": ((*TEXT, "--backbone", "x"), "belong to the confidence policy; got --backbone x"),
    "field": (
        (*TEXT, "--field", "text"),
        "--field is of corpora of the kinds jsonl, parquet",
    ),
    "kind": ((*TEXT, "--kind", "ids"), "0.txt: token ids must be a whole .npy file"),
    "nan": ((*IDS, "--max-memory-gib", "nan"), "--max-memory-gib must be a number; got nan"),
    "documents": ((*IDS, "--min-documents", 2), "the corpus must have as many documents; got 1"),
    "protect": ((*IDS, "--protect", "digits"), "protected tokens need a tokenizer; got ['digits']"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_broken_rule_is_told_and_leaves_nothing(
    umim: Umim, corpus: Path, tokenizer: Path, name: str
) -> None:
    arguments, message = ERRORS[name]
    before = set(corpus.rglob("*"))
    result = umim(*(tokenizer if a == "TOKENIZER" else a for a in arguments), "--json")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("umim: error: ")
    assert message in result.err
    assert set(corpus.rglob("*")) == before
