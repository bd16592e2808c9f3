"""``umim mine`` against counting and filtering by hand, and what it says of broken rules."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from support.command_line import Result, Umim, console
from umim_core.embedded.assets import embedded_path
from umim_core.rules.ruleset import RuleSet

Span = tuple[int, ...]
Rules = dict[Span, int]


@pytest.fixture
def umim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Umim:
    return console(monkeypatch, capsys)


def frequent(ids: list[int], length: int, tau: int, special: set[int]) -> Rules:
    counts: Counter[Span] = Counter()
    for start in range(0, len(ids) - length + 1, length):
        segment = ids[start : start + length]
        for n in (2, 3, 4):
            counts.update(tuple(segment[i : i + n]) for i in range(length - n + 1))
    return {s: c for s, c in counts.items() if c >= tau and not special & set(s)}


def without_overlap(rules: Rules) -> Rules:
    kept: list[Span] = []
    for rule in sorted(rules, key=lambda s: (-rules[s], s)):
        if not any(
            len(rule) == len(other) and (rule[1:] == other[:-1] or other[1:] == rule[:-1])
            for other in kept
        ):
            kept.append(rule)
    return {rule: rules[rule] for rule in kept}


def without_contained(rules: Rules) -> Rules:
    def inside(a: Span, b: Span) -> bool:
        return any(b[i : i + len(a)] == a for i in range(len(b) - len(a) + 1))

    return {
        a: c for a, c in rules.items() if not any(len(b) > len(a) and inside(a, b) for b in rules)
    }


def per_order(rules: Rules) -> dict[str, int]:
    return {str(n): sum(len(span) == n for span in rules) for n in (2, 3, 4)}


def loaded(directory: Path) -> Rules:
    rules = RuleSet.load(directory)
    return {
        tuple(span): count
        for n in (2, 3, 4)
        for span, count in zip(
            rules.ids_by_order[n].tolist(), rules.support_by_order[n].tolist(), strict=True
        )
    }


def check(result: Result, out: Path, ids: list[int], length: int, tau: int, **options: str) -> None:
    assert result.code == 0, result.err
    special = {0} if options.get("special") else set()
    raw = frequent(ids, length, tau, special)
    left = without_overlap(raw) if options["overlap"] == "greedy" else raw
    rules = without_contained(left) if options["containment"] == "drop" else left
    document = json.loads(result.out)
    found = {name: document[name] for name in ("raw", "overlap", "rules")}
    assert found == {"raw": per_order(raw), "overlap": per_order(left), "rules": per_order(rules)}
    assert document["tokens"] == len(ids) // length * length
    assert loaded(out) == rules


@pytest.fixture(scope="module")
def tokenizer(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast
) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer.save_pretrained(folder)
    return folder


def few_words(seed: int, tokens: int = 300, words: int = 5) -> list[int]:
    return np.random.default_rng(seed).integers(0, words, tokens).tolist()


@pytest.mark.parametrize("containment", ["drop", "keep"])
@pytest.mark.parametrize("overlap", ["greedy", "none"])
@pytest.mark.parametrize("length", [2, 3, 4, 7, 150])
@pytest.mark.parametrize("tau", [1, 2, 5])
def test_rules_of_text_equal_the_oracle(
    umim: Umim,
    tokenizer: Path,
    tmp_path: Path,
    tau: int,
    length: int,
    overlap: str,
    containment: str,
) -> None:
    ids = few_words(tau * 1000 + length)
    words = ["<eos>" if i == 0 else f"w{i}" for i in ids]
    for number, part in enumerate((words[:90], words[90:])):  # two documents, joined
        (tmp_path / f"{number}.txt").write_text(" ".join(part))
    options = ["--tau", tau, "--segment-length", length, "--json"]
    options += ["--overlap", overlap, "--containment", containment, "--out", tmp_path / "out"]
    result = umim("mine", tmp_path / "*.txt", "--tokenizer", tokenizer, *options)
    policies = {"overlap": overlap, "containment": containment, "special": "yes"}
    check(result, tmp_path / "out", ids, length, tau, **policies)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize(("tau", "length"), [(1, 3), (2, 7), (5, 300)])
def test_rules_of_ids_equal_the_oracle(
    umim: Umim, tmp_path: Path, tau: int, length: int, dtype: type
) -> None:
    ids = few_words(tau)
    np.save(tmp_path / "ids.npy", np.array(ids, dtype))
    out = tmp_path / "out"
    options = ["--tau", tau, "--segment-length", length, "--out", out, "--json"]
    result = umim("mine", tmp_path / "ids.npy", *options)
    check(result, out, ids, length, tau, overlap="greedy", containment="drop")
    assert RuleSet.load(out).origin.tokenizer_fingerprint is None


@pytest.mark.parametrize("ending", ["txt", "jsonl"])
def test_rules_by_the_embedded_tokenizer_equal_the_oracle(
    umim: Umim, tmp_path: Path, ending: str
) -> None:
    text = "Return the mean of the array.\n\nReturn the sum of the array along the axis.\n" * 20
    row = json.dumps({"body": text}) + "\n"
    (tmp_path / f"a.{ending}").write_text(text if ending == "txt" else row)
    assets = embedded_path("umim-docs-llama", "backbone")
    assert assets is not None
    core = Tokenizer.from_file(str(assets / "tokenizer.json"))
    ids = core.encode(text, add_special_tokens=False).ids
    out = tmp_path / "out"
    options = ["--tokenizer", "umim-docs-llama", "--field", "body", "--segment-length", 64]
    result = umim("mine", tmp_path / f"a.{ending}", *options, "--out", out, "--json")
    check(result, out, ids, 64, 5, overlap="greedy", containment="drop")


def test_json_is_alone_on_stdout_of_a_real_process(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([1, 2, 3] * 40, np.uint16))
    entry = [sys.executable, "-c", "from umim_core.cli.app import main; main()"]
    options = ["--out", "out", "--segment-length", "60", "--json"]
    command = [*entry, "mine", "ids.npy", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["rules"] == {"2": 0, "3": 0, "4": 1}
    assert document["out"] == "out"


TEXT = ("mine", "a.txt", "--tokenizer", "TOKENIZER", "--out", "new")
ERRORS = {
    "out exists": ((*TEXT[:-1], "old"), "the output directory must not exist; got old"),
    "out is a file": ((*TEXT[:-1], "a.txt"), "the output directory must not exist; got a.txt"),
    "out below a file": (
        (*TEXT[:-1], "a.txt/x"),
        "a.txt must be a folder that can be written",
    ),
    "file": (("mine", "no.txt", *TEXT[2:]), "a corpus file must exist; got no.txt"),
    "ids file": (("mine", "no.npy", *TEXT[2:]), "a corpus file must exist; got no.npy"),
    "path": (("mine", "./no/such", *TEXT[2:]), "a corpus file must exist; got ./no/such"),
    "long name": (("mine", "n" * 300 + ".txt", *TEXT[2:]), "a corpus file must exist; got nnn"),
    "pattern": (("mine", "no*.txt", *TEXT[2:]), "a pattern must match a file; got no*.txt"),
    "folder": (("mine", "empty", *TEXT[2:]), "a folder must hold files that end in .txt, .md, "),
    "large tau": ((*TEXT, "--tau", "9" * 20), "tau must be at most 9223372036854775807; got 999"),
    "no rule": (
        (*TEXT, "--tau", "1000", "--segment-length", "2"),
        "the count of the most frequent n-gram; got 1000",
    ),
    "no tokenizer": (("mine", "a.txt", "--out", "new"), "text needs a tokenizer; got none"),
    "tokenizer": ((*TEXT[:3], "no/such", *TEXT[4:]), "a tokenizer must be a known name"),
    "tau": ((*TEXT, "--tau", "0"), "tau must be at least 1; got 0"),
    "segment": ((*TEXT, "--segment-length", "1"), "segment_length must be at least 2; got 1"),
    "negative": ((*TEXT, "--segment-length", "-5"), "segment_length must be at least 2; got -5"),
    "short": ((*TEXT, "--segment-length", "5"), "at least one segment of 5 tokens; got less"),
    "mixed": (("mine", "a.txt", "a.npy", *TEXT[2:]), "must be of one kind; got ids, text"),
    "two": (("mine", "a.npy", "b.npy", *TEXT[2:]), "kind ids must be one name; got a.npy, b.npy"),
    "signed": (("mine", "signed.npy", "--out", "new"), "unsigned integer type; got shape (3,), dt"),
    "float": (("mine", "float.npy", "--out", "new"), "unsigned integer type; got shape (3,), dty"),
    "2-D": (("mine", "flat.npy", "--out", "new"), "non-empty 1-D array"),
    "no ids": (("mine", "none.npy", "--out", "new"), "non-empty 1-D array"),
    "torn ids": (("mine", "torn.npy", "--out", "new"), "a whole .npy file of plain integers"),
    "wide id": (("mine", "wide.npy", "--out", "new"), "0..262143; got 262144 at position 1"),
    "alien id": (("mine", "b.npy", *TEXT[2:], "--segment-length", "2"), "0..31, the tokenizer's"),
    "json": (("mine", "bad.jsonl", *TEXT[2:]), "bad.jsonl:2: a line must be JSON"),
    "field": (("mine", "bad.jsonl", *TEXT[2:], "--field", "x"), "must have the field 'x'"),
    "no field": (("mine", "bad.jsonl", *TEXT[2:], "--field", ""), "field: String should have at"),
    "utf-8": (("mine", "latin.txt", *TEXT[2:]), "latin.txt: text must be UTF-8"),
    "empty": (("mine", "empty.txt", *TEXT[2:]), "at least one non-empty document"),
    "no out": (("mine", "a.npy"), "--out must name the rule directory to write; got nothing"),
}


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "kept").write_text("kept")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("w1 w2 w3")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("größe".encode("latin-1"))
    (tmp_path / "bad.jsonl").write_text('{"text": "w1"}\n{"text": \n')
    arrays = {
        "a": np.array([1, 2, 3], np.uint16),
        "b": np.array([1, 32, 2], np.uint16),
        "signed": np.array([1, 2, 3], np.int32),
        "float": np.array([1.0, 2.0, 3.0]),
        "flat": np.ones((2, 2), np.uint8),
        "none": np.zeros(0, np.uint8),
        "wide": np.array([1, 1 << 18], np.uint32),
    }
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    (tmp_path / "torn.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-1])
    return tmp_path


def listing(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.mark.parametrize("name", ERRORS)
def test_a_broken_rule_is_told_and_leaves_nothing(
    umim: Umim, corpus: Path, tokenizer: Path, name: str
) -> None:
    arguments, message = ERRORS[name]
    before = listing(corpus)
    result = umim(*(str(tokenizer) if a == "TOKENIZER" else a for a in arguments), "--json")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("umim: error: ")
    assert message in result.err
    assert listing(corpus) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "new", "--overlap", "some"], "'some' is not one of 'greedy', 'none'"),
        (["--out", "new", "--containment", "maybe"], "'maybe' is not one of 'drop', 'keep'"),
        (["--out", "new", "--tau", "five"], "Invalid value for '--tau'"),
        (["--out", "new", "--max-bad", "-1"], "Invalid value for '--max-bad'"),
        (["--out", "new", "--taus", "5"], "No such option: --taus"),
        (["--out", "new", "--threads", "two"], "Invalid value for '--threads'"),
    ],
)
def test_wrong_usage_is_told(umim: Umim, corpus: Path, options: list[str], message: str) -> None:
    result = umim("mine", "a.npy", *options)
    assert (result.code, result.out) == (2, "")
    assert message in " ".join(result.err.replace("│", " ").split())
    assert not (corpus / "new").exists()
