from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from umim_core.errors import CorpusError
from umim_core.text.sources import (
    HubDataset,
    JsonLines,
    ParquetFiles,
    Source,
    TextFiles,
    TokenIds,
    source_of,
)


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


def test_a_folder_stands_for_its_text_files_one_document_each(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    names = ("b.txt", "a.md", "below/c.txt.gz", "picture.png")
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    wanted = sorted(str(tmp_path / name) for name in names[:3])
    assert source_of((str(tmp_path),)) == TextFiles(paths=tuple(wanted))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("picture.png",), r"a folder must hold files that end in .*with 1 other files"),
        (("a.txt", "b.jsonl"), "all sources must be of one kind; got jsonl, text"),
    ],
)
def test_a_folder_of_no_one_kind_is_refused_and_never_a_data_set(
    tmp_path: Path, names: tuple[str, ...], message: str
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CorpusError, match=message):
        source_of((str(tmp_path),))
