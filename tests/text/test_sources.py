from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from umim_core.text import HubDataset, JsonLines, ParquetFiles, Source, TextFiles, TokenIds


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
