from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.s3 import arrow_address, s3_files, s3_server
from support.sites import here
from support.sites import made as stand_in
from tasks.run.stage import Artifact, key_parts
from tasks.stages import corpus as corpus_stages
from tasks.stages.corpus import (
    RECORD,
    CorpusText,
    corpus_stage,
    cut_at_lines,
    mixture_stage,
    sources_of_splits,
    split_tokens,
    tokenize_stage,
)
from tasks.stages.named import NamedTokenizer, without_places
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.corpus import FilesCorpus, GeneratedCorpus, MixtureCorpus
from umim_core.config.model_base import SPLITS
from umim_core.errors import CorpusError
from umim_core.store.artifacts import read_json
from umim_core.text.sources import iter_documents

if TYPE_CHECKING:
    from s3fs import S3FileSystem

NAME = "umim-docs-gpt2"
SECRET = "sEcReTwOrD"


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server() as settings:
        yield settings


@pytest.fixture
def store(server: dict[str, str]) -> S3FileSystem:
    files = s3_files(server)
    for split in SPLITS:
        files.pipe(f"umim/{split}.txt", f"Return the {split} array.".encode())
    return files


@pytest.fixture
def config(server: dict[str, str], store: S3FileSystem) -> FilesCorpus:
    credentials = f"AKID:{SECRET}"
    paths = {split: arrow_address(server, f"{split}.txt", credentials) for split in SPLITS}
    return FilesCorpus.model_validate(
        {split: {"kind": "text", "paths": [path]} for split, path in paths.items()}
    )


def made(config: FilesCorpus, root: Path) -> Artifact:
    return corpus_stage(text=CorpusText(config)).build(here(root))


def tokenize(config: FilesCorpus, corpus: Artifact, root: Path) -> Artifact:
    text, tokenizer = CorpusText(config), NamedTokenizer(NAME)
    call = tokenize_stage(corpus=corpus, text=text, train_tokens=None, tokenizer=tokenizer)
    return call.build(here(root))


def test_a_remote_corpus_is_tokenised_and_leaves_no_credentials(
    tmp_path: Path, config: FilesCorpus
) -> None:
    done = tokenize(config, made(config, tmp_path), tmp_path)
    expected = load_tokenizer(NAME).encode("Return the valid array.", add_special_tokens=False)
    assert split_tokens(done, "valid")[:].tolist() == expected
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 6
    assert all(SECRET.encode() not in path.read_bytes() for path in files)


@pytest.mark.parametrize("meanwhile", [False, True])
def test_remote_files_that_change_under_the_pipeline_are_refused(
    tmp_path: Path,
    config: FilesCorpus,
    store: S3FileSystem,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: bool,
) -> None:
    corpus, tokenize_splits = made(config, tmp_path), corpus_stages.tokenize_splits

    def change(*args: Any) -> Any:
        store.pipe("umim/valid.txt", b"Return the other array.")
        return tokenize_splits(*args) if args else None

    if meanwhile:
        monkeypatch.setattr(corpus_stages, "tokenize_splits", change)
    else:
        change()
    with pytest.raises(CorpusError, match="must stay as they are while the pipeline runs"):
        tokenize(config, corpus, tmp_path)
    assert not [path for path in (tmp_path / "tokenize").glob("*") if path.suffix == ""]


def files(source: dict[str, Any], **more: dict[str, Any]) -> FilesCorpus:
    every = dict.fromkeys(SPLITS, source)
    return FilesCorpus.model_validate(every | {"out_of_domain": more})


def mixture(**parts: dict[str, Any]) -> MixtureCorpus:
    own = {name: {"kind": "files", **dict.fromkeys(SPLITS, part)} for name, part in parts.items()}
    return MixtureCorpus.model_validate({"parts": own})


def key(corpus: object) -> object:
    return key_parts({"text": CorpusText(corpus)}, {})  # type: ignore[arg-type]


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """A file with two fields that hold different texts."""
    path = tmp_path / "rows.jsonl"
    row = {"text": "Return the sum.", "body": "The quick brown fox."}
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    "change", [{"field": "body"}, {"max_bad": 3}, {"nul": "keep"}, {"kind": "text", "field": None}]
)
def test_how_a_file_is_read_decides_the_corpus(
    tmp_path: Path, rows: str, change: dict[str, Any]
) -> None:
    source = {"kind": "jsonl", "paths": [rows], "field": "text"}
    changed = {name: value for name, value in (source | change).items() if value is not None}
    corpora = [files(source), files(changed), files(source, other=source)]
    corpora.append(files(source, other=changed))
    digests = {made(corpus, tmp_path).digest for corpus in corpora}
    assert len(digests) == len(corpora)


@pytest.mark.parametrize("name", ["paths", "name"])
def test_a_name_that_the_user_gives_is_no_place(tmp_path: Path, rows: str, name: str) -> None:
    part = {"kind": "jsonl", "paths": [rows]}
    plain: Any = without_places(mixture(**{name: part}, b=part))
    assert plain["parts"].keys() == {name, "b"}
    assert all("paths" not in part["train"] for part in plain["parts"].values())
    further: Any = without_places(files(part, **{name: part}))
    assert further["out_of_domain"].keys() == {name}
    # Order and cut of the documents are of the part by that name.
    assert key(mixture(**{name: part}, b=part)) != key(mixture(c=part, b=part))
    docs = {"parts": {name: {"kind": "docstrings"}}}
    texts = [MixtureCorpus.model_validate(docs | {"max_characters": most}) for most in (9, 10)]
    assert key(texts[0]) != key(texts[1])


@pytest.mark.parametrize(
    ("kind", "place", "name"),
    [
        ("text", "paths", "rows.jsonl"),
        ("parquet", "paths", "rows.parquet"),
        ("ids", "path", "ids.npy"),
        ("dataset", "name", ""),
    ],
)
def test_a_corpus_that_is_moved_stays_the_same(
    tmp_path: Path, rows: str, kind: str, place: str, name: str
) -> None:
    at, moved = tmp_path / "at", tmp_path / "moved"
    at.mkdir()
    shutil.copy(rows, at / "rows.jsonl")
    pq.write_table(pa.table({"text": ["Return the sum."]}), at / "rows.parquet")
    np.save(at / "ids.npy", np.arange(9, dtype=np.uint16))
    shutil.copytree(at, moved)
    places = [str(folder / name) for folder in (at, moved)]
    one, other = (
        key(files({"kind": kind, place: [found] if place == "paths" else found}))
        for found in places
    )
    assert one == other


def test_the_model_of_a_generated_corpus_is_a_place_and_a_repository_none(rows: str) -> None:
    raw = {"questions": [{"kind": "jsonl", "paths": [rows]}], "model": NAME, "revision": "main"}
    plain: Any = without_places(GeneratedCorpus.model_validate(raw))
    assert not {"model", "revision"} & plain.keys()
    assert "paths" not in plain["questions"][0]
    pinned = {"kind": "dataset", "revision": "0" * 40}  # nobody asks whether it belongs there
    assert key(files(pinned | {"name": "owner/a"})) != key(files(pinned | {"name": "other/b"}))


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


@pytest.fixture
def mixed_parts(tmp_path: Path) -> MixtureCorpus:
    """A book of many lines, short notes in two packed files, and docstrings."""
    for split in SPLITS:
        book = "".join(f"{split} chapter {i}\n" for i in range(300))
        (tmp_path / f"book-{split}.txt").write_text(book, encoding="utf-8")
        for number in range(2):
            with gzip.open(tmp_path / f"{number}-{split}.jsonl.gz", "wt", encoding="utf-8") as file:
                file.writelines(
                    json.dumps({"text": f"{split} note {number} {i}\f."}) + "\n" for i in range(40)
                )

    def of(kind: str, pattern: str) -> dict[str, object]:
        found = {s: {"kind": kind, "paths": [str(tmp_path / pattern.format(s))]} for s in SPLITS}
        return {"kind": "files", "licence": f"{kind} licence", **found}

    raw = {
        "book": of("text", "book-{}.txt"),
        "notes": of("jsonl", "*-{}.jsonl.gz"),
        "docs": {"kind": "docstrings"},
    }
    return MixtureCorpus.model_validate({"parts": raw, "max_characters": 200})


@pytest.fixture
def docstrings(tmp_path: Path) -> Artifact:
    def write(out: Path) -> None:
        for split in SPLITS:
            lines = [json.dumps({"text": f"Return the {split} array {i}.\0"}) for i in range(30)]
            (out / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")

    return stand_in(tmp_path, "corpus", write)


def test_every_split_holds_all_parts_and_a_part_its_own_test_documents(
    mixed_parts: MixtureCorpus, docstrings: Artifact, tmp_path: Path
) -> None:
    text = CorpusText(mixed_parts)
    mixed = mixture_stage(text=text, docstrings=docstrings).build(here(tmp_path))
    for split in SPLITS:
        lines = (mixed.path / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        found = Counter(row["part"] for row in rows)
        assert (found["notes"], found["docs"]) == (80, 30)
        book = [row["text"] for row in rows if row["part"] == "book"]
        assert max(map(len, book)) <= 200
        assert Counter("".join(book).splitlines()) == Counter(
            f"{split} chapter {i}" for i in range(300)
        )
        first = {json.loads(line)["part"] for line in lines[: len(lines) // 4]}
        assert first == {"book", "notes", "docs"}
    (book,) = iter_documents(sources_of_splits(mixed, text)["part_book"])
    assert book == (tmp_path / "book-test.txt").read_text(encoding="utf-8")
    notes = iter_documents(sources_of_splits(mixed, text)["part_notes"])
    assert list(notes)[41] == "test note 1 1\f."
    other = CorpusText(mixed_parts.model_copy(update={"seed": 1}))
    again = mixture_stage(text=other, docstrings=docstrings).build(here(tmp_path))
    assert (again.path / "train.jsonl").read_bytes() != (mixed.path / "train.jsonl").read_bytes()
    assert again.metrics == mixed.metrics
    assert {path.suffix for path in again.path.iterdir()} == {".jsonl", ".json"}


@pytest.mark.parametrize(
    ("document", "limit", "pieces"),
    [
        ("one\ntwo three", 9, ["one\n", "two three"]),
        ("one two three", 7, ["one", " two", " three"]),
        ("0123456789abc", 9, ["012345678", "9abc"]),
        ("a\n\nb", 9, ["a\n\nb"]),
    ],
)
def test_a_document_is_cut_at_a_line_end_a_space_or_where_it_must(
    document: str, limit: int, pieces: list[str]
) -> None:
    assert list(cut_at_lines(document, limit)) == pieces
