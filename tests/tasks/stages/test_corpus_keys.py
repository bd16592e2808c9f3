"""Keys of corpora: they hold what decides the text, and not where it lies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.sites import here
from tasks.run.stage import Artifact, key_parts
from tasks.stages.corpus import RECORD, CorpusText, corpus_stage, mixture_stage, tokenize_stage
from tasks.stages.named import NamedTokenizer, without_places
from umim_core.config.corpus import SPLITS, FilesCorpus, GeneratedCorpus, MixtureCorpus
from umim_core.store.artifacts import read_json

NAME = "umim-docs-gpt2"


def files(source: dict[str, Any], **more: dict[str, Any]) -> FilesCorpus:
    every = dict.fromkeys(SPLITS, source)
    return FilesCorpus.model_validate(every | {"out_of_domain": more})


def mixture(**parts: dict[str, Any]) -> MixtureCorpus:
    own = {name: {"kind": "files", **dict.fromkeys(SPLITS, of)} for name, of in parts.items()}
    return MixtureCorpus.model_validate({"parts": own})


def tokenized(config: FilesCorpus, root: Path) -> Artifact:
    text, tokenizer = CorpusText(config), NamedTokenizer(NAME)
    corpus = corpus_stage(text=text).build(here(root))
    call = tokenize_stage(corpus=corpus, text=text, train_tokens=None, tokenizer=tokenizer)
    return call.build(here(root))


def key(corpus: object) -> object:
    return key_parts({"text": CorpusText(corpus)}, {})  # type: ignore[arg-type]


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """A file with two fields that hold different texts."""
    path = tmp_path / "rows.jsonl"
    row = {"text": "Return the sum.", "body": "The quick brown fox."}
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return str(path)


def test_another_field_of_the_same_file_is_another_text(tmp_path: Path, rows: str) -> None:
    def of(field: str) -> dict[str, Any]:
        return {"kind": "jsonl", "paths": [rows], "field": field}

    first, second = tokenized(files(of("text")), tmp_path), tokenized(files(of("body")), tmp_path)
    assert first.executed and second.executed
    assert first.metrics["tokens_train"] != second.metrics["tokens_train"]
    other = tokenized(files(of("body"), other=of("text")), tmp_path)
    assert other.executed
    assert tokenized(files(of("body"), other=of("body")), tmp_path).executed
    assert not tokenized(files(of("text")), tmp_path).executed


@pytest.mark.parametrize(
    "change", [{"max_bad": 3}, {"nul": "keep"}, {"kind": "text", "field": None}]
)
def test_how_a_file_is_read_decides_the_corpus(
    tmp_path: Path, rows: str, change: dict[str, Any]
) -> None:
    source = {"kind": "jsonl", "paths": [rows], "field": "text"}
    changed = {name: value for name, value in (source | change).items() if value is not None}
    corpora = [CorpusText(files(of)) for of in (source, changed)]
    made = [corpus_stage(text=text).build(here(tmp_path)) for text in corpora]
    assert made[0].digest != made[1].digest


def test_train_tokens_decide_no_corpus(tmp_path: Path, rows: str) -> None:
    config = files({"kind": "jsonl", "paths": [rows]})
    limited = config.model_copy(update={"train_tokens": 9})
    made = [corpus_stage(text=CorpusText(c)).build(here(tmp_path)) for c in (config, limited)]
    assert [artifact.executed for artifact in made] == [True, False]


@pytest.mark.parametrize("name", ["paths", "model", "revision", "path", "name"])
def test_a_name_that_the_user_gives_is_no_place(tmp_path: Path, rows: str, name: str) -> None:
    of = {"kind": "jsonl", "paths": [rows]}
    plain: Any = without_places(mixture(**{name: of}, b=of))
    assert plain["parts"].keys() == {name, "b"}
    assert all("paths" not in part["train"] for part in plain["parts"].values())
    further: Any = without_places(files(of, **{name: of}))
    assert further["out_of_domain"].keys() == {name}
    # Order and cut of the documents are of the part by that name.
    assert key(mixture(**{name: of}, b=of)) != key(mixture(c=of, b=of))
    docs = {"parts": {name: {"kind": "docstrings"}}}
    texts = [MixtureCorpus.model_validate(docs | {"max_characters": most}) for most in (9, 10)]
    assert key(texts[0]) != key(texts[1])


def test_the_model_of_a_generated_corpus_is_a_place(rows: str) -> None:
    raw = {"questions": [{"kind": "jsonl", "paths": [rows]}], "model": NAME, "revision": "main"}
    plain: Any = without_places(GeneratedCorpus.model_validate(raw))
    assert not {"model", "revision"} & plain.keys()
    assert "paths" not in plain["questions"][0]


def test_a_corpus_that_is_moved_stays_the_same(tmp_path: Path, rows: str) -> None:
    at, moved = tmp_path / "at", tmp_path / "moved"
    at.mkdir()
    shutil.copy(rows, at / "rows.jsonl")
    np.save(at / "ids.npy", np.arange(9, dtype=np.uint16))
    shutil.copytree(at, moved)
    ids, local = ({"kind": "ids", "path": "ids.npy"}, {"kind": "dataset", "name": ""})
    for source in (ids, local):
        place = "path" if source["kind"] == "ids" else "name"
        keys = [key(files(source | {place: str(of / source[place])})) for of in (at, moved)]
        assert keys[0] == keys[1], source["kind"]
    pinned = {"kind": "dataset", "revision": "0" * 40}
    assert key(files(pinned | {"name": "owner/a"})) == key(files(pinned | {"name": "other/b"}))


def test_the_record_of_a_mixture_loses_no_file_and_tells_no_folder(tmp_path: Path) -> None:
    for number, folder in enumerate(("a", "b", "c", "set")):
        (tmp_path / folder).mkdir()
        row = json.dumps({"text": f"Return the array {number}."})
        (tmp_path / folder / "train.jsonl").write_text(row + "\n", encoding="utf-8")
    paths = [str(tmp_path / name / "train.jsonl") for name in "abc"]
    text = CorpusText(
        mixture(
            notes={"kind": "jsonl", "paths": paths},
            rows={"kind": "dataset", "name": str(tmp_path / "set")},
        )
    )
    made = mixture_stage(text=text, docstrings=None).build(here(tmp_path / "root"))
    record: Any = read_json(made.path / RECORD)
    train = record["notes"]["files"]["train"]
    assert [*train] == ["train.jsonl", "train.jsonl (2)", "train.jsonl (3)"]
    assert sorted(train.values()) == sorted(
        text.files.digests[f"notes.train:{number}"] for number in range(3)
    )
    assert len({*train.values()}) == 3
    assert [*record["rows"]["files"]["train"]] == ["set train"]
    assert str(tmp_path) not in (made.path / RECORD).read_text(encoding="utf-8")
