"""Budgets, documents, protected tokens, candidates, dry runs and limits of ``umim mine``."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from support.command_line import Result, Umim, console
from support.ngram_oracle import Grams, cut, document_oracle, oracle
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


def test_rules_of_few_documents_are_left_out(umim: Umim, corpus: Path, tokenizer: Path) -> None:
    result = mine(umim, tokenizer, "--out", "out", "--min-documents", 3)
    assert result.code == 0, result.err
    assert "3,000 tokens in 150 segments, 4 documents; tau 3" in result.out
    documents = document_oracle(cut(stream(), LENGTH), np.cumsum(SIZES).tolist())
    want = {gram: count for gram, count in frequent(3).items() if documents[gram] >= 3}
    assert written() == want
    assert len(want) < len(frequent(3))


def test_protected_tokens_may_be_given_several_times(
    umim: Umim, corpus: Path, tokenizer: Path
) -> None:
    result = mine(umim, tokenizer, "--out", "out", "--protect", "w1$", "--protect", "2")
    assert result.code == 0, result.err
    assert written() == frequent(3, frozenset({1, 2, 12}))


@pytest.mark.parametrize("options", [("--kernel", "numpy"), ("--threads", 1), ("--threads", 3)])
def test_kernel_and_threads_do_not_change_the_digest(
    umim: Umim, corpus: Path, tokenizer: Path, options: tuple[object, ...]
) -> None:
    plain = json.loads(mine(umim, tokenizer, "--out", "a", "--json").out)
    other = json.loads(mine(umim, tokenizer, "--out", "b", *options, "--json").out)
    assert plain["digest"] == other["digest"]
    assert Path("a/rules.parquet").read_bytes() == Path("b/rules.parquet").read_bytes()


def test_the_order_of_the_arguments_does_not_change_the_digest(
    umim: Umim, corpus: Path, tokenizer: Path
) -> None:
    digests = set()
    for number, names in enumerate((["0.txt", "1.txt", "2.txt"], ["2.txt", "0.txt", "1.txt"])):
        how = ("--tokenizer", tokenizer, *PLAIN, "--out", f"out{number}", "--json")
        digests.add(json.loads(umim("mine", *names, *how).out)["digest"])
    assert len(digests) == 1


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


def test_without_candidate_mode_none_are_told(umim: Umim, corpus: Path, tokenizer: Path) -> None:
    document = json.loads(mine(umim, tokenizer, "--out", "out", "--json").out)
    assert document["candidates"] is None
    assert "prediction" not in document


def listing(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.mark.parametrize("out", [(), ("--out", "out")])
def test_a_dry_run_prints_a_table_and_writes_nothing(
    umim: Umim, corpus: Path, tokenizer: Path, out: tuple[str, ...]
) -> None:
    before = listing(corpus)
    result = mine(umim, tokenizer, *out, "--dry-run")
    assert result.code == 0, result.err
    assert result.out.startswith("Predicted from a sample; nothing was written.\n")
    rows = [line.split() for line in result.out.splitlines()]
    assert ["for", "3,000", "tokens"] in rows
    assert [row for row in rows if row[:2] == ["time,", "tokenize"]]
    assert [row for row in rows if row[:2] == ["frequent", "4-grams"]]
    assert listing(corpus) == before


def test_a_dry_run_prints_one_json_document(umim: Umim, corpus: Path, tokenizer: Path) -> None:
    result = mine(umim, tokenizer, "--dry-run", "--json")
    document = json.loads(result.out)
    assert list(document) == ["prediction"]
    assert document["prediction"]["tokens"] == 3000
    want = frequent(3)
    told = document["prediction"]["frequent"]
    for n in (2, 3):
        assert told[str(n)] == pytest.approx(sum(len(gram) == n for gram in want), rel=0.05)
    assert set(document["prediction"]["seconds"]) == {"tokenize", "count_2", "count_3", "count_4"}


def test_a_dry_run_of_ready_ids_needs_no_tokenizer(umim: Umim, corpus: Path) -> None:
    result = umim("mine", "ids.npy", *PLAIN, "--dry-run", "--json")
    assert json.loads(result.out)["prediction"]["tokens"] == 3000


def test_a_dry_run_of_a_small_corpus_says_so(umim: Umim, corpus: Path) -> None:
    np.save("few.npy", np.arange(2000, dtype=np.uint16))
    how = ("mine", "few.npy", "--segment-length", 512, "--dry-run")
    small = "The corpus is too small for a prediction: mining it takes seconds.\n"
    assert umim(*how).out == small
    assert json.loads(umim(*how, "--json").out) == {"prediction": None}


def test_a_dry_run_believes_the_number_of_tokens(umim: Umim, corpus: Path, tokenizer: Path) -> None:
    result = mine(umim, tokenizer, "--dry-run", "--tokens", 10**12, "--json")
    prediction = json.loads(result.out)["prediction"]
    assert prediction["tokens"] == 10**12
    assert prediction["disk_bytes"] > 4e12


def test_a_dry_run_of_packed_text_reads_it(umim: Umim, corpus: Path, tokenizer: Path) -> None:
    Path("a.txt.gz").write_bytes(gzip.compress(Path("1.txt").read_bytes() * 2))
    # The last word of one copy and the first of the other are one unknown word.
    how = ("--tokenizer", tokenizer, "--segment-length", 20, "--dry-run", "--json")
    result = umim("mine", "a.txt.gz", *how)
    assert json.loads(result.out)["prediction"]["tokens"] == 2199


LIMITS = {
    "--max-memory-gib": r"mining must take at most 0.001 GiB of memory; got ",
    "--max-disk-gib": r"mining must take at most 1e-06 GiB of disk; got ",
    "--max-hours": r"mining must take at most 1e-12 hours of time; got ",
}
TINY = {"--max-memory-gib": "0.001", "--max-disk-gib": "1e-6", "--max-hours": "1e-12"}


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_below_the_prediction_refuses_and_leaves_nothing(
    umim: Umim, corpus: Path, tokenizer: Path, name: str
) -> None:
    before = listing(corpus)
    result = mine(umim, tokenizer, "--out", "out", name, TINY[name], "--json")
    assert (result.code, result.out) == (1, "")
    assert LIMITS[name] in result.err
    assert "predicted for 3,000 tokens. Raise tau or the limit" in result.err
    assert listing(corpus) == before


def test_a_dry_run_beyond_a_limit_shows_the_prediction_and_fails(
    umim: Umim, corpus: Path, tokenizer: Path
) -> None:
    result = mine(umim, tokenizer, "--dry-run", "--max-disk-gib", "1e-6", "--json")
    assert result.code == 1
    assert json.loads(result.out)["prediction"]["tokens"] == 3000
    assert LIMITS["--max-disk-gib"] in result.err


def test_within_its_limits_a_run_tells_how_good_the_prediction_was(
    umim: Umim, corpus: Path, tokenizer: Path
) -> None:
    limits = ("--max-memory-gib", 500, "--max-disk-gib", 10, "--max-hours", 10)
    document = json.loads(mine(umim, tokenizer, "--out", "a", *limits, "--json").out)
    assert list(document["prediction"]) == ["memory_bytes", "seconds"]
    for error in document["prediction"].values():
        assert error["measured"] > 0
        assert error["error"] == pytest.approx(error["predicted"] / error["measured"] - 1)
    lines = mine(umim, tokenizer, "--out", "b", *limits).out.splitlines()
    assert [line.split()[2] for line in lines if line.startswith("predicted ")] == ["GiB,", "s,"]
    assert written("a") == written("b") == frequent(3)


def test_limits_on_a_corpus_too_small_for_a_prediction_do_not_stop_it(
    umim: Umim, corpus: Path
) -> None:
    np.save("few.npy", np.arange(2000, dtype=np.uint16) % 50)
    how = ("--segment-length", 512, "--out", "out", "--max-hours", "1e-12", "--json")
    result = umim("mine", "few.npy", *how)
    assert result.code == 0, result.err
    assert "prediction" not in json.loads(result.out)


ERRORS = {
    "budget": (("--rule-budget", 0), "rule_budget must be at least 1; got 0"),
    "documents": (("--min-documents", 0), "min_documents must be at least 1; got 0"),
    "sample": (("--sample-tokens", 0), "sample_tokens must be at least 1; got 0"),
    "threads": (("--threads", 0), "threads must be at least 1; got 0"),
    "pattern": (("--protect", "("), "a protected pattern must be a regular expression or one of"),
    "all": (("--protect", "digits"), "must leave tokens that rules can use; got 'digits', which"),
    "dry tau": (("--dry-run", "--tau", 0), "tau must be at least 1; got 0"),
    "dry pattern": (("--dry-run", "--protect", "("), "must be a regular expression or one of"),
    "tokens": (("--dry-run", "--tokens", 0), "tokens must be at least 1; got 0"),
    "tokenizer": (
        ("--policy", "confidence", "--backbone", "x"),
        "have no part in the confidence policy; the backbone brings its tokenizer; got --tokenizer",
    ),
    "backbone": (("--backbone", "x"), "belong to the confidence policy; got --backbone x"),
    "confidence": (("--confidence", 0.9), "belong to the confidence policy; got --confidence 0.9"),
    "size": (("--tokens", 5), "--tokens belong to --dry-run or a limit; got --tokens 5"),
    "dry numpy": (("--dry-run", "--kernel", "numpy"), "predictions are made for the numba kernel"),
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
    "dry protect": (("--protect", "digits", "--dry-run"), "protected tokens need a tokenizer"),
}


@pytest.mark.parametrize("name", IDS_ERRORS)
def test_what_ready_ids_cannot_give_is_told(umim: Umim, corpus: Path, name: str) -> None:
    options, message = IDS_ERRORS[name]
    before = listing(corpus)
    result = umim("mine", "ids.npy", *PLAIN, "--out", "out", *options, "--json")
    assert (result.code, result.out) == (1, "")
    assert message in result.err
    assert listing(corpus) == before
