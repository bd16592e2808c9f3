from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from umim_core.errors import CorpusError
from umim_core.text.readers import iter_documents
from umim_core.text.sources import HubDataset, ParquetFiles

# Parquet


def write_table(path: Path, column: pa.Array, name: str = "text") -> str:
    pq.write_table(pa.table({"other": range(len(column)), name: column}), path)
    return str(path)


def read_parquet(path: str, max_bad: int = 0) -> list[str]:
    return list(iter_documents(ParquetFiles(paths=(path,), max_bad=max_bad)))


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_parquet_gives_the_column_in_order(tmp_path: Path, kind: pa.DataType) -> None:
    texts = [f"text {i % 7} Ω" for i in range(1000)]
    assert read_parquet(write_table(tmp_path / "a.parquet", pa.array(texts).cast(kind))) == texts


def test_a_null_is_refused_with_its_row(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.parquet", pa.array([*["x"] * 300, None, "y"]))
    with pytest.raises(CorpusError, match=r"a\.parquet: row 300: the field must hold a string"):
        read_parquet(path)
    assert read_parquet(path, max_bad=1) == [*["x"] * 300, "y"]


@pytest.mark.parametrize(
    ("column", "name", "message"),
    [
        (pa.array(["x"]), "body", r"must be a column 'text'; got columns \['other', 'body'\]"),
        (pa.array([1]), "text", "column 'text' must hold strings; got int64"),
        (pa.array([b"x"]), "text", "column 'text' must hold strings; got binary"),
    ],
)
def test_a_wrong_column_is_refused(
    tmp_path: Path, column: pa.Array, name: str, message: str
) -> None:
    with pytest.raises(CorpusError, match=message):
        read_parquet(write_table(tmp_path / "a.parquet", column, name))


@pytest.mark.parametrize("keep", [0, 10, -20])
def test_a_torn_parquet_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = write_table(tmp_path / "a.parquet", pa.array(["x"] * 100))
    Path(path).write_bytes(Path(path).read_bytes()[:keep])
    with pytest.raises(CorpusError, match=r"a\.parquet: the file must be readable and whole"):
        read_parquet(path)


# Hugging Face data sets


def test_a_field_with_dots_lies_inside_a_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "programs"
    folder.mkdir()
    # a record of lists, as CodeContests has it, and a list of records
    rows = [
        {"by": [1, 3], "code": ["a = 1", "b"]},
        {"by": [], "code": []},
        {"by": [2], "code": ["c"]},
    ]
    records = [[{"code": "a = 1"}, {"code": "b"}], [], [{"code": "c"}]]
    lines = [{"one": row, "two": items} for row, items in zip(rows, records, strict=True)]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for field in ("one.code", "two.code"):
        found = list(iter_documents(HubDataset(name=str(folder), field=field)))
        assert found == ["a = 1", "b", "c"]
    with pytest.raises(CorpusError, match="a row must have the field 'text'"):
        list(iter_documents(HubDataset(name=str(folder), field="one.text")))
    with pytest.raises(
        CorpusError, match=r"there must be a column 'three'; got columns \['one', 'two'\]"
    ):
        list(iter_documents(HubDataset(name=str(folder), field="three.code")))


def test_offline_an_unknown_data_set_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(CorpusError, match=r"'no/such' must be loadable.*offline, name a local"):
        list(iter_documents(HubDataset(name="no/such")))
