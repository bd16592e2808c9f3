"""Files of an exported model's spans: what is altered, torn or of another version is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from umim_core.errors import ArtifactError, TokenizerMismatchError
from umim_core.rules.ruleset import RuleSet
from umim_core.serving.span_files import RECORD, TABLE, TOKENIZER, SpanTable
from umim_core.store.artifacts import sha256_file

SPANS = [(1, 2), (3, 4), (1, 2, 3), (4, 5, 6, 7)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / TOKENIZER).write_text("{}")
    SpanTable(RuleSet.from_spans(SPANS, "a" * 64), 50, 16).write(tmp_path)
    return tmp_path


def change(folder: Path, **fields: Any) -> None:
    record = json.loads((folder / RECORD).read_text())
    (folder / RECORD).write_text(json.dumps(record | fields))


def put(folder: Path, **tensors: Any) -> None:
    """Replace the tensors and their digest."""
    save_file(tensors, folder / TABLE)
    files = json.loads((folder / RECORD).read_text())["files"]
    change(folder, files=files | {TABLE: sha256_file(folder / TABLE)})


def test_what_was_written_is_read(folder: Path) -> None:
    table = SpanTable.load(folder, tokenizer_fingerprint="a" * 64)
    assert [tuple(row) for n in (2, 3, 4) for row in table.rules.ids_by_order[n].tolist()] == SPANS
    assert (table.vocab_size, table.raw_tail, table.fingerprint) == (50, 16, "a" * 64)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": 2}, "must have format 1; got 2"),
        ({"vocab_size": 0}, "must describe the spans"),
        ({"spans": 5}, r"must hold ids \[5, 4\]"),
        ({"vocab_size": 7}, r"span ids must lie in 0\.\.6; got 7"),
    ],
)
def test_other_records_are_refused(folder: Path, fields: dict[str, Any], message: str) -> None:
    change(folder, **fields)
    with pytest.raises(ArtifactError, match=message):
        SpanTable.load(folder)


@pytest.mark.parametrize("name", [RECORD, TABLE])
def test_a_missing_file_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ArtifactError, match=name):
        SpanTable.load(folder)


@pytest.mark.parametrize(
    ("ids", "lengths"),
    [
        ([[1, 2, -1, -1], [1, 2, 3, -1]] * 2, [2, 3, 2, 3]),
        ([[1, 2, -1, -1]] * 4, [2] * 4),
        ([[1, 2, 3, 4]] * 4, [5] * 4),
    ],
    ids=["orders", "twice", "long"],
)
def test_tables_that_no_export_writes_are_refused(
    folder: Path, ids: list[list[int]], lengths: list[int]
) -> None:
    put(folder, ids=np.array(ids, np.int32), lengths=np.array(lengths, np.int8))
    with pytest.raises(ArtifactError, match=r"must hold (sorted )?spans"):
        SpanTable.load(folder)


def test_another_tokenizer_is_refused(folder: Path) -> None:
    with pytest.raises(TokenizerMismatchError):
        SpanTable.load(folder, tokenizer_fingerprint="b" * 64)
    (folder / TOKENIZER).write_text('{"version": "1.0"}')
    with pytest.raises(TokenizerMismatchError, match="must be the tokenizer"):
        SpanTable.load(folder)
