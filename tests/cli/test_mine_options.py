"""Budgets, documents, protected tokens, candidates and the memory limit of ``umim mine``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from support.command_line import Result, Umim, console
from support.ngram_oracle import Grams, cut, oracle
from umim_core.rules.grams import ORDERS
from umim_core.rules.ruleset import RuleSet

LENGTH = 20
SIZES = [900, 1100, 600, 400]
PLAIN = ("--segment-length", LENGTH, "--tau", 3, "--overlap", "none", "--containment", "keep")


@pytest.fixture
def umim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Umim:
    return console(monkeypatch, capsys)


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
    """Four text files, and all their ids in one array."""
    monkeypatch.chdir(tmp_path)
    for number, ids in enumerate(np.split(stream(), np.cumsum(SIZES)[:-1])):
        (tmp_path / f"{number}.txt").write_text(" ".join(f"w{i}" for i in ids))
    np.save(tmp_path / "ids.npy", stream().astype(np.uint16))
    return tmp_path


def mine(umim: Umim, tokenizer: Path, *options: object) -> Result:
    return umim("mine", "*.txt", "--tokenizer", tokenizer, *PLAIN, *options)


def written(name: str = "out") -> Grams:
    rules = RuleSet.load(name)
    return {
        tuple(gram): int(count)
        for n in ORDERS
        for gram, count in zip(
            rules.ids_by_order[n].tolist(), rules.support_by_order[n].tolist(), strict=True
        )
    }


def frequent(tau: int, excluded: frozenset[int] = frozenset()) -> Grams:
    return oracle(cut(stream(), LENGTH), tau, excluded)


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


def test_candidate_mode_tells_how_it_chose(umim: Umim, corpus: Path, tokenizer: Path) -> None:
    options = ("--out", "out", "--sample-tokens", 1000)
    result = mine(umim, tokenizer, *options)
    assert result.code == 0, result.err
    found = frequent(3)
    assert set(written().items()) <= set(found.items())
    line = next(line for line in result.out.splitlines() if "candidates" in line)
    assert "% of the tokens, counted exactly; an n-gram at tau is missed with probability" in line
    again = json.loads(mine(umim, tokenizer, "--out", "again", *options[2:], "--json").out)
    told = again["candidates"]
    assert set(told) == {"fraction", "candidates", "sample_tau", "miss_probability"}
    assert f"{told['candidates']:,} candidates from {told['fraction']:.1%}" in line
    assert 0.1 < told["fraction"] < 0.5  # one of three groups, the last is smaller
    assert 0 < told["miss_probability"] < 1
    assert written("again") == written()


def listing(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_a_limit_below_the_bound_refuses_and_leaves_nothing(
    umim: Umim, corpus: Path, tokenizer: Path
) -> None:
    before = listing(corpus)
    result = mine(umim, tokenizer, "--out", "out", "--max-memory-gib", "0.0001", "--json")
    assert (result.code, result.out) == (1, "")
    assert "mining must take at most 0.0001 GiB of memory; got up to " in result.err
    assert "GiB for 3,000 tokens. Raise tau or the limit" in result.err
    assert listing(corpus) == before


ERRORS = {
    "budget": (("--rule-budget", 0), "rule_budget must be at least 1; got 0"),
    "documents": (("--min-documents", 0), "min_documents must be at least 1; got 0"),
    "sample": (("--sample-tokens", 0), "sample_tokens must be at least 1; got 0"),
    "threads": (("--threads", 0), "threads must be at least 1; got 0"),
    "pattern": (("--protect", "("), "a protected pattern must be a regular expression or one of"),
    "all": (("--protect", "digits"), "must leave tokens that rules can use; got 'digits', which"),
    "tokenizer": (
        ("--policy", "confidence", "--backbone", "x"),
        "have no part in the confidence policy; the backbone brings its tokenizer; got --tokenizer",
    ),
    "backbone": (("--backbone", "x"), "belong to the confidence policy; got --backbone x"),
    "confidence": (("--confidence", 0.9), "belong to the confidence policy; got --confidence 0.9"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_broken_rule_is_told_and_leaves_nothing(
    umim: Umim, corpus: Path, tokenizer: Path, name: str
) -> None:
    options, message = ERRORS[name]
    before = listing(corpus)
    result = mine(umim, tokenizer, "--out", "out", *options, "--json")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("umim: error: ")
    assert message in result.err
    assert listing(corpus) == before


IDS_ERRORS = {
    "documents": (("--min-documents", 2), "the corpus must have as many documents; got 1"),
    "protect": (("--protect", "digits"), "protected tokens need a tokenizer; got ['digits']"),
}


@pytest.mark.parametrize("name", IDS_ERRORS)
def test_what_ready_ids_cannot_give_is_told(umim: Umim, corpus: Path, name: str) -> None:
    options, message = IDS_ERRORS[name]
    before = listing(corpus)
    result = umim("mine", "ids.npy", *PLAIN, "--out", "out", *options, "--json")
    assert (result.code, result.out) == (1, "")
    assert message in result.err
    assert listing(corpus) == before
