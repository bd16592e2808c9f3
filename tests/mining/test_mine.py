"""Mining in one process: the same rules however they are counted, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.ngram_oracle import Grams, cut, document_oracle, grams_of, oracle
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.rule_options import RuleOptions
from umim_core.errors import (
    ArtifactError,
    ConfigError,
    CorpusError,
    RuleSetError,
    UmimError,
)
from umim_core.mining.mine import MiningReport, candidate_spans, mine_rules
from umim_core.rules.ruleset import RuleSet
from umim_core.text.sources import Source, TextFiles, TokenIds, source_of

PLAIN = RuleOptions(tau=2, segment_length=10, overlap="none", containment="keep", threads=1)
WORDS = 12
LENGTHS = [70, 0, 1, 45, 200, 13, 90, 2]


def with_options(**changes: object) -> RuleOptions:
    return RuleOptions.model_validate(PLAIN.model_dump() | changes)


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> str:
    return str(tokenizer_folder)


def documents() -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(1, WORDS, size).tolist() for size in LENGTHS]


@pytest.fixture
def corpus(tmp_path: Path) -> Source:
    """Eight documents, one of them without text and some shorter than an n-gram."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, document in enumerate(documents()):
        (folder / f"{number}.txt").write_text(" ".join(f"w{i}" for i in document))
    return source_of((f"{folder}/*.txt",))


def stream() -> np.ndarray:
    return np.concatenate([np.array(document, dtype=np.int64) for document in documents()])


def mined(
    corpus: Source, tmp_path: Path, tokenizer: str | None, **changes: object
) -> tuple[MiningReport, Grams]:
    out = tmp_path / "out"
    report = mine_rules(corpus, out, tokenizer=tokenizer, options=with_options(**changes))
    rules = RuleSet.load(out)
    assert rules.digest == report.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out"]
    return report, grams_of(rules)


@pytest.mark.parametrize("longest", [4, 9])
def test_rules_and_report_equal_the_oracle(
    corpus: Source, tmp_path: Path, tokenizer: str, longest: int
) -> None:
    with (tmp_path / "corpus" / "7.txt").open("a") as file:
        file.write(" " + " ".join(f"w{i}" for i in [*range(1, 11)] * 4))
    report, rules = mined(corpus, tmp_path, tokenizer, longest=longest)
    ids = np.append(stream(), np.tile(np.arange(1, 11), 4))
    want = oracle(cut(ids, 10), 2, longest=longest)
    assert rules == want
    assert (report.tokens, report.segments, report.documents) == (460, 46, 7)
    per_order = {n: sum(len(gram) == n for gram in want) for n in range(2, longest + 1)}
    assert report.raw == report.overlap == report.rules == per_order
    assert report.tau == 2
    assert sorted(report.seconds) == ["count", "filter", "tokenize"]


def test_special_and_protected_tokens_are_in_no_rule(tmp_path: Path, tokenizer: str) -> None:
    ids = np.random.default_rng(2).integers(0, WORDS, 1200)  # those with a 1 are w1, w10 and w11
    np.save(tmp_path / "ids.npy", ids.astype(np.uint16))
    source, options = TokenIds(path=str(tmp_path / "ids.npy")), with_options(protect=("1",))
    mine_rules(source, str(tmp_path / "out"), tokenizer=tokenizer, options=options)
    expected = oracle(cut(ids, 10), 2, frozenset({0, 1, 10, 11}))
    assert grams_of(RuleSet.load(tmp_path / "out")) == expected != {}


def test_what_few_documents_repeat_is_no_rule(
    corpus: Source, tmp_path: Path, tokenizer: str
) -> None:
    _, rules = mined(corpus, tmp_path, tokenizer, min_documents=3)
    segments = cut(stream(), 10)
    documents, counts = document_oracle(segments, np.cumsum(LENGTHS).tolist()), oracle(segments, 2)
    assert rules == {gram: n for gram, n in counts.items() if documents[gram] >= 3}
    assert 0 < len(rules) < len(counts)


def test_spans_that_may_be_chosen_of_logs_hold_no_digit() -> None:
    known = load_tokenizer("umim-docs-llama")
    text = np.array(known("the shape of array 12 is the shape of array 34")["input_ids"])
    rules, _, _ = candidate_spans([text] * 3, known, 16)
    found = [known.decode(gram) for gram in grams_of(rules)]
    assert " shape of array" in found
    assert not any(character.isdigit() for span in found for character in span)


def test_files_in_any_order_and_their_ids_give_the_same_rules(
    corpus: Source, tmp_path: Path, tokenizer: str
) -> None:
    paths = sorted(map(str, (tmp_path / "corpus").iterdir()))
    shuffled = [paths[number] for number in np.random.default_rng(1).permutation(len(paths))]
    np.save(tmp_path / "ids.npy", stream().astype(np.uint32))
    sources = {
        "pattern": corpus,
        "sorted": TextFiles(paths=tuple(paths)),
        "falling": TextFiles(paths=tuple(paths[::-1])),
        "shuffled": TextFiles(paths=tuple(shuffled)),
        "ids": TokenIds(path=str(tmp_path / "ids.npy")),
    }
    digests = {
        mine_rules(source, tmp_path / name, tokenizer=tokenizer, options=PLAIN).digest
        for name, source in sources.items()
    }
    assert len(digests) == 1


# The content of a file, if another one, options, and what is said.
BROKEN: dict[str, tuple[bytes, dict[str, object], type[UmimError], str]] = {
    "no UTF-8": (b"w1 \xff", {}, CorpusError, "UTF-8"),
    "a NUL": (b"\0", {}, CorpusError, "NUL"),
    "too short": (b"", {"segment_length": 10_000}, CorpusError, "one segment of 10000 tokens"),
    "every token": (b"", {"protect": ("digits",)}, ConfigError, "'digits', which matches all 31"),
    "no tokenizer": (b"", {"protect": ("digits",)}, ConfigError, r"need a tokenizer; got \['digi"),
    "nothing frequent": (b"", {"tau": 999}, RuleSetError, f"999 times; got {sum(LENGTHS)} tokens"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("out", ["out", "new/deep/out"])
def test_an_error_in_the_corpus_leaves_nothing(
    corpus: Source, tmp_path: Path, tokenizer: str, name: str, out: str
) -> None:
    content, changes, error, message = BROKEN[name]
    if content:
        (tmp_path / "corpus" / "3.txt").write_bytes(content)
    named, options = None if name == "no tokenizer" else tokenizer, with_options(**changes)
    with pytest.raises(error, match=message):
        mine_rules(corpus, tmp_path / out, tokenizer=named, options=options)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_an_existing_output_is_refused_before_the_corpus_is_read(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("nowhere")
    with pytest.raises(ArtifactError, match="the output directory must not exist"):
        mine_rules(TextFiles(paths=("no.txt",)), tmp_path / "out", tokenizer=None)


# Options, and what is said where rules are counted, and where a model is confident about them.
EARLY: list[tuple[dict[str, object], str, str]] = [
    ({}, "no.txt", "no.txt"),
    ({"protect": ("(",)}, r"expression .*\(", r"expression .*\("),
    ({"segment_length": 65}, "no.txt", "64 positions; got 65 positions"),
    ({"segment_length": None}, "segment_length", "segment_length"),
    ({"source": "explicit"}, "'frequency'", "'confidence'"),
]


@pytest.mark.parametrize(("changes", "counted", "confident"), EARLY)
def test_options_are_refused_before_the_corpus_is_read(
    tmp_path: Path,
    tiny_llama: Backbone,
    tokenizer: str,
    changes: dict[str, object],
    counted: str,
    confident: str,
) -> None:
    for named, message in (
        ({"tokenizer": tokenizer}, counted),
        ({"backbone": tiny_llama, "source": "confidence"}, confident),
    ):
        source = {"source": named.pop("source", "frequency")}
        options = RuleOptions.model_validate({"segment_length": 64} | source | changes)
        with pytest.raises(UmimError, match=message):
            mine_rules(TextFiles(paths=("no.txt",)), tmp_path / "out", **named, options=options)
