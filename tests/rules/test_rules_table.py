"""The file of a rule set: every malformed row, column and description is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from umim_core.errors import ArtifactError, RuleSetError
from umim_core.rules.origin import RuleOrigin
from umim_core.rules.ruleset import TABLE_SCHEMA, RuleSet
from umim_core.store.artifacts import write_manifest
from umim_core.text.token_ids import MAX_TOKEN_ID

ORIGIN = {
    "tau": 1,
    "overlap": "greedy",
    "containment": "drop",
    "segment_length": 64,
    "tokenizer_fingerprint": "a" * 64,
    "corpus_digest": "b" * 64,
}


EVERY = RuleOrigin().record()


def write_rules(directory: Path, table: pa.Table, **changes: object) -> Path:
    """Write a rule directory by hand, with a manifest that fits its files."""
    directory.mkdir()
    pq.write_table(table, directory / "rules.parquet")
    body = {
        key: value for key, value in {**EVERY, **ORIGIN, **changes}.items() if value != "absent"
    }
    write_manifest(directory, kind="rules", schema=2, body=body)
    return directory


def table_of(
    rows: list[tuple[object, object, object]], schema: pa.Schema = TABLE_SCHEMA
) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else ([], [], [])
    return pa.table(
        [pa.array(list(c), f.type) for c, f in zip(columns, schema, strict=True)], schema=schema
    )


GOOD = [(2, [1, 2], 5), (2, [1, 3], 5), (3, [0, 1, 2], 7), (4, [0, 0, 0, MAX_TOKEN_ID], 1)]


def test_a_directory_written_by_hand_loads(tmp_path: Path) -> None:
    rules = RuleSet.load(write_rules(tmp_path / "rules", table_of(GOOD)))
    assert rules.counts_by_order == {2: 2, 3: 1, 4: 1}
    assert rules.ids_by_order[4].tolist() == [[0, 0, 0, MAX_TOKEN_ID]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(2, [1, -1], 5)], r"rule ids must lie in 0\.\.262143; got -1\.\.1"),
        ([(2, [1, MAX_TOKEN_ID + 1], 5)], r"must lie in 0\.\.262143; got 1\.\.262144"),
        ([(17, list(range(17)), 5)], "rules of 2 to 16 ids"),
        ([(5, [1, 2, 3, 4], 5)], "rules of 2 to 16 ids"),
        ([(1, [1], 5)], "rules of 2 to 16 ids"),
        ([(2, [1, 2, 3], 5)], "rules of 2 to 16 ids"),
        ([(3, [1, 2], 5)], "rules of 2 to 16 ids"),
        ([(3, [1, 2], 5), (2, [1, 2, 3], 5)], "rules of 2 to 16 ids"),
        ([(3, [1, 2, 3], 5), (2, [1, 2], 5)], "sorted by n"),
        ([(2, [1, 2], 5), (2, [1, 2], 5)], r"sorted and all different; got \[1, 2\]"),
        ([(2, [1, 3], 5), (2, [1, 2], 5)], r"sorted and all different; got \[1, 2\]"),
        ([(2, [2, 0], 5), (2, [1, 9], 5)], "sorted and all different"),
        ([(2, [1, 2], 0)], "every count must reach tau; got 0"),
        ([(2, [1, 2], -5)], "every count must reach tau; got -5"),
        ([(2, None, 5)], "no nulls"),
        ([(2, [1, None], 5)], "no nulls"),
        ([(2, [None, None], 5)], "no nulls"),
        ([(None, [1, 2], 5)], "no nulls"),
        ([(2, [1, 2], None)], "no nulls"),
    ],
)
def test_malformed_rows_are_refused(tmp_path: Path, rows: list, message: str) -> None:
    with pytest.raises(RuleSetError, match=message):
        RuleSet.load(write_rules(tmp_path / "rules", table_of(rows)))


@pytest.mark.parametrize(
    "types",
    [
        {"n": pa.int32()},
        {"ids": pa.list_(pa.int64())},
        {"ids": pa.list_(pa.float32())},
        {"count": pa.float64()},
    ],
    ids=str,
)
def test_columns_of_another_type_are_refused(tmp_path: Path, types: dict[str, pa.DataType]) -> None:
    schema = pa.schema([(f.name, types.get(f.name, f.type)) for f in TABLE_SCHEMA])
    rows = [("2" if types.get("n") == pa.string() else 2, [1, 2], 5)]
    with pytest.raises(RuleSetError, match="columns n int8, ids list<int32>, count int64"):
        RuleSet.load(write_rules(tmp_path / "rules", table_of(rows, schema)))


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.drop_columns(["count"]),
        lambda table: table.append_column("more", table["n"]),
        lambda table: table.select(["ids", "n", "count"]),
        lambda table: table.rename_columns(["n", "ids", "support"]),
    ],
)
def test_other_columns_are_refused(tmp_path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    with pytest.raises(RuleSetError, match="must have the columns n int8"):
        RuleSet.load(write_rules(tmp_path / "rules", change(table_of(GOOD))))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\xff" * 64 + b"PAR1", b"text" * 99])
def test_a_table_that_is_no_parquet_file_is_refused(tmp_path: Path, content: bytes) -> None:
    directory = write_rules(tmp_path / "rules", table_of(GOOD))
    (directory / "rules.parquet").write_bytes(content)
    write_manifest(directory, kind="rules", schema=2, body=EVERY | ORIGIN)
    with pytest.raises(RuleSetError, match="must be a Parquet file"):
        RuleSet.load(directory)


def test_counts_below_the_threshold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuleSetError, match="every count must reach tau; got 5"):
        RuleSet.load(write_rules(tmp_path / "rules", table_of(GOOD[:2]), tau=6))


def test_other_numbers_of_rules_than_the_manifest_counts_are_refused(tmp_path: Path) -> None:
    counts = {"2": 2, "3": 1, "4": 1}
    assert len(RuleSet.load(write_rules(tmp_path / "good", table_of(GOOD), rules=counts))) == 4
    with pytest.raises(RuleSetError, match=r"manifest counts, \{'2': 2.*got \{'2': 2, '3': 0"):
        RuleSet.load(write_rules(tmp_path / "bad", table_of(GOOD[:2]), rules=counts))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tau", "five"),
        ("tau", 2.5),
        ("tau", "absent"),
        ("overlap", "clever"),
        ("containment", None),
        ("segment_length", "512"),
        ("tokenizer_fingerprint", 7),
        ("corpus_digest", "absent"),
        ("source", "hearsay"),
        ("source", None),
        ("min_documents", "2"),
    ],
)
def test_a_manifest_that_does_not_describe_its_rules_is_refused(
    tmp_path: Path, name: str, value: object
) -> None:
    with pytest.raises(ArtifactError, match=f"must describe its rules.*{name}"):
        RuleSet.load(write_rules(tmp_path / "rules", table_of(GOOD), **{name: value}))


@pytest.mark.parametrize("shape", ["many rows", "one row"])
def test_a_small_file_that_takes_a_gigabyte_is_refused_unread(
    tmp_path: Path, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, ids = (4_000_000, 2) if shape == "many rows" else (1, 17_000_000)
    offsets = np.arange(rows + 1, dtype=np.int32) * ids
    columns = [
        pa.array(np.full(rows, 2, np.int8)),
        pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(rows * ids, np.int32))),
        pa.array(np.ones(rows, np.int64)),
    ]
    directory = write_rules(tmp_path / "rules", pa.table(columns, schema=TABLE_SCHEMA))
    assert (directory / "rules.parquet").stat().st_size < 1 << 20
    read: list[object] = []
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *args: read.append(args))
    with pytest.raises(RuleSetError, match=f"{rows} rows with {rows * ids} ids"):
        RuleSet.load(directory)
    assert not read
