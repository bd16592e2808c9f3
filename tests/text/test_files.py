"""Corpus files: canonical order, kinds, and remote files in a store that speaks S3 protocol."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import traceback
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter, ValidationError

from support.object_store import ObjectStore, object_store
from umim_core.errors import CorpusError
from umim_core.text.files import expand
from umim_core.text.readers import BadRows, iter_documents
from umim_core.text.sources import (
    HubDataset,
    JsonLines,
    ParquetFiles,
    Source,
    TextFiles,
    TokenIds,
    source_of,
)
from umim_core.text.tokens import iter_token_ids

USER, SECRET = "AKIDEXAMPLE", "sEcReT/wOrD"
CREDENTIALS = f"{USER}:sEcReT%2FwOrD@"


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    table = io.BytesIO()
    pq.write_table(pa.table({"text": [f"row {i}" for i in range(600)], "n": range(600)}), table)
    lines = [json.dumps({"text": text}) for text in ("one", "zwölf")]
    with object_store() as found:
        found.objects |= {
            "data/books/a.txt": b"\xef\xbb\xbffirst\r\n",
            "data/books/b c.txt": "zweites Büch".encode(),
            "data/books/deep/d.txt": b"fourth",
            "data/books/e.md": b"no text file",
            "data/rows.jsonl.gz": gzip.compress("\n".join(lines).encode()),
            "data/bad.jsonl.gz": gzip.compress(b'{"text": "good"}\n{'),
            "data/torn.jsonl.gz": gzip.compress(b'{"text": "x"}\n' * 9000)[:-9],
            "data/table.parquet": table.getvalue(),
            "data/torn.parquet": table.getvalue()[:-9],
        }
        yield found


def uri(store: ObjectStore, path: str) -> str:
    return store.uri(path, CREDENTIALS)


def shown(error: BaseException) -> str:
    """All that a traceback would print."""
    return "".join(traceback.format_exception(error))


def assert_no_secret(text: str) -> None:
    assert USER not in text
    assert SECRET not in text
    assert "sEcReT" not in text


# Remote files


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("data/books/a.txt", ["first\r\n"]),
        ("data/books/*.txt", ["first\r\n", "zweites Büch"]),
        ("data/books/**/*.txt", ["first\r\n", "zweites Büch", "fourth"]),
        ("data/b*/deep/*", ["fourth"]),
    ],
)
def test_remote_text_files_and_patterns(store: ObjectStore, pattern: str, texts: list[str]) -> None:
    assert list(iter_documents(TextFiles(paths=(uri(store, pattern),)))) == texts


def test_remote_json_lines_are_unpacked(store: ObjectStore) -> None:
    source = source_of((uri(store, "data/rows.jsonl.gz"),))
    assert isinstance(source, JsonLines)
    assert list(iter_documents(source)) == ["one", "zwölf"]


def test_remote_parquet_is_read(store: ObjectStore) -> None:
    source = source_of((uri(store, "data/table.parquet"),))
    assert isinstance(source, ParquetFiles)
    store.requests.clear()
    assert list(iter_documents(source)) == [f"row {i}" for i in range(600)]
    assert any(request.startswith("GET data/table.parquet bytes=") for request in store.requests)


def test_a_remote_text_file_is_read_in_large_ranges(store: ObjectStore) -> None:
    store.objects["data/long.txt"] = b"some words " * 1_000_000
    store.requests.clear()
    found = list(iter_documents(TextFiles(paths=(uri(store, "data/long.txt"),))))
    assert found == ["some words " * 1_000_000]
    assert 1 < sum(request.startswith("GET") for request in store.requests) < 6


def test_the_digest_is_that_of_the_stored_bytes(store: ObjectStore) -> None:
    (file,) = expand((uri(store, "data/rows.jsonl.gz"),))
    assert file.sha256() == hashlib.sha256(store.objects["data/rows.jsonl.gz"]).hexdigest()


REMOTE_FAULTS: dict[str, tuple[type[Source], str, str]] = {
    "missing": (TextFiles, "data/none.txt", r"a corpus file must exist; got s3://\*\*\*@data/none"),
    "folder": (
        TextFiles,
        "data/books",
        r"must be that of a file; .* s3://\*\*\*@data/books/\*\.txt",
    ),
    "pattern": (TextFiles, "data/*.none", "a pattern must match a file"),
    "bucket": (TextFiles, "none/*.txt", "a pattern must match a file"),
    "bad row": (JsonLines, "data/bad.jsonl.gz", r"@data/bad\.jsonl\.gz:2: a line must be JSON"),
    "torn gz": (JsonLines, "data/torn.jsonl.gz", r"torn\.jsonl\.gz: the file must be readable and"),
    "torn table": (ParquetFiles, "data/torn.parquet", "torn.parquet: the file must be readable"),
    "odd address": (TextFiles, "data/a b.txt", "the address must be one that Arrow's file systems"),
}


@pytest.mark.parametrize("case", REMOTE_FAULTS)
def test_remote_faults_name_the_file_and_no_secret(store: ObjectStore, case: str) -> None:
    kind, path, message = REMOTE_FAULTS[case]
    with pytest.raises(CorpusError, match=message) as caught:
        list(iter_documents(kind(paths=(uri(store, path),))))
    assert_no_secret(shown(caught.value))


@pytest.mark.full
def test_a_store_that_does_not_answer_is_named_without_secrets() -> None:
    with object_store() as gone:
        address = uri(gone, "data/a.txt")
    with pytest.raises(
        CorpusError, match=r"s3://\*\*\*@data/a\.txt: the file must be rea"
    ) as found:
        expand((address,))
    assert_no_secret(shown(found.value))


def test_skipped_rows_and_empty_sources_show_no_secret(store: ObjectStore) -> None:
    bad = BadRows()
    source = JsonLines(paths=(uri(store, "data/bad.jsonl.gz"),), max_bad=1)
    assert list(iter_documents(source, bad)) == ["good"]
    assert_no_secret(bad.first[0])
    store.objects["data/empty.txt"] = b""
    with pytest.raises(CorpusError, match="at least one non-empty document") as caught:
        list(iter_documents(TextFiles(paths=(uri(store, "data/empty.txt"),))))
    assert_no_secret(shown(caught.value))


def test_ready_ids_are_read_from_local_files_alone(store: ObjectStore) -> None:
    store.objects["data/ids.npy"] = b"x"
    with pytest.raises(CorpusError, match=r"ids\.npy: token ids must be a local file") as caught:
        list(iter_token_ids(TokenIds(path=uri(store, "data/ids.npy"))))
    assert_no_secret(shown(caught.value))


# Credentials


def test_sources_dumped_as_json_hold_no_credentials() -> None:
    source = TextFiles(paths=("s3://AK:SK@bucket/key?region=x", "local.txt"))
    assert source.model_dump(mode="json")["paths"] == ["s3://***@bucket/key?region=x", "local.txt"]
    assert source.model_dump()["paths"] == source.paths


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ({"kind": "text", "paths": ["a"]}, TextFiles),
        ({"kind": "jsonl", "paths": ["a"], "field": "body", "max_bad": 3}, JsonLines),
        ({"kind": "parquet", "paths": ["a"]}, ParquetFiles),
        ({"kind": "dataset", "name": "a/b", "config": "c", "revision": "d"}, HubDataset),
        ({"kind": "ids", "path": "a.npy"}, TokenIds),
    ],
)
def test_sources_are_told_apart_by_kind(data: dict[str, object], kind: type) -> None:
    source = TypeAdapter(Source).validate_python(data)
    assert type(source) is kind
    assert TypeAdapter(Source).validate_json(source.model_dump_json()) == source


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "text", "paths": []},
        {"kind": "text", "paths": ["a"], "max_bad": 1},
        {"kind": "jsonl", "paths": ["a"], "max_bad": -1},
        {"kind": "csv", "paths": ["a"]},
        {"paths": ["a"]},
    ],
)
def test_sources_outside_their_bounds_are_refused(data: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Source).validate_python(data)
