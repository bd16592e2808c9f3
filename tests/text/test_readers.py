from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.packers import PACKERS
from umim_core.errors import CorpusError
from umim_core.text import readers
from umim_core.text.readers import BadRows, iter_documents
from umim_core.text.sources import JsonLines, TextFiles

WHERE = "jsonl:2"


def write(path: Path, data: bytes | str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def read_text(*paths: str) -> list[str]:
    return list(iter_documents(TextFiles(paths=paths)))


def read_json(path: str, max_bad: int = 0, bad: BadRows | None = None) -> list[str]:
    return list(iter_documents(JsonLines(paths=(path,), max_bad=max_bad), bad))


# Text files


def test_files_come_sorted_by_path_whatever_the_order_of_the_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/c.txt", "z.md"):
        write(tmp_path / name, name)
    found = read_text(str(tmp_path / "z.md"), str(tmp_path / "**" / "*.txt"))
    assert found == ["a.txt", "b.txt", "deep/c.txt", "z.md"]


def test_the_byte_order_mark_is_stripped_and_line_ends_stay(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\r\n\xef\xbb\xbf")
    assert read_text(path) == ["one\r\ntwo\r\n\ufeff"]


def test_empty_documents_are_left_out(tmp_path: Path) -> None:
    paths = [write(tmp_path / n, t) for n, t in (("a", ""), ("b", "text"), ("c", "\ufeff"))]
    assert read_text(*paths) == ["text"]


def test_a_corpus_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="at least one non-empty document"):
        read_text(write(tmp_path / "a.txt", ""))


# JSON lines


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_json_lines_give_the_field_in_order(tmp_path: Path, suffix: str, ends: str) -> None:
    texts = ["one", "two\nlines\u2028here", "Ω", 'quote " and \\']
    lines = "\ufeff" + ends.join([*(json.dumps({"text": t, "n": 1}) for t in texts), "", " "])
    assert read_json(write(tmp_path / f"a.jsonl{suffix}", PACKERS[suffix](lines.encode()))) == texts


BAD_LINES = {
    "not json": (b"{", "a line must be JSON"),
    "deep": (b"[" * 100_000, "a line must be JSON"),
    "utf8": (b'{"text": "\xff"}', "a line must be UTF-8; got invalid start byte at byte 10"),
    "list": (b'["text"]', "a row must be a JSON object"),
    "missing field": (b'{"body": "x"}', r"must have the field 'text'; got fields \['body'\]"),
    "number": (b'{"text": 5}', "the field must hold a string; got 5"),
    "null": (b'{"text": null}', "the field must hold a string; got None"),
    "nul": (b'{"text": "a\\u0000"}', "must not hold NUL; got NUL at character 1"),
    "surrogate": (b'{"text": "ab\\ud800"}', "lone surrogates; got .* at character 2"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_refused_with_file_and_line(tmp_path: Path, case: str) -> None:
    line, message = BAD_LINES[case]
    path = write(tmp_path / "a.jsonl", b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(CorpusError, match=rf"a\.{WHERE}: .*{message}"):
        read_json(path)


def test_allowed_bad_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    good = b'{"text": "good"}'
    bad_lines = [line for line, _ in BAD_LINES.values()]
    path = write(tmp_path / "a.jsonl", b"\n".join([good, *bad_lines, good]))
    bad = BadRows()
    assert read_json(path, max_bad=len(bad_lines), bad=bad) == ["good", "good"]
    assert bad.count == len(bad_lines)
    assert [m.partition(": ")[0] for m in bad.first] == [f"{path}:{i + 2}" for i in range(9)]


@pytest.mark.parametrize("kind", ["txt", "jsonl", "json"])
@pytest.mark.parametrize("suffix", [suffix for suffix in PACKERS if suffix])
@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_a_torn_packed_file_is_an_error_even_where_bad_rows_are_allowed(
    tmp_path: Path, kind: str, suffix: str, keep: float
) -> None:
    lines = [f'{{"text": "{i * 7919 % 10007}"}}' for i in range(30_000)]
    packed = PACKERS[suffix](
        ("[" * (kind == "json") + ",\n"[kind != "json" :].join(lines)).encode()
    )
    path = write(tmp_path / f"a.{kind}{suffix}", packed[: int(len(packed) * keep)])
    with pytest.raises(CorpusError, match=rf"a\.{kind}\{suffix}: the file must be readable and"):
        read_text(path) if kind == "txt" else read_json(path, max_bad=10)


TRICKY = '[,]{} \\" 世\u2028'
ITEMS = [{"text": f"row {i} {TRICKY}", "n": [i, -1.5e-3, None, {}]} for i in range(9)]


@pytest.mark.parametrize("indent", [None, 0, 2, "\t"])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("chunk", [8, 13, 1 << 20])
def test_json_arrays_give_the_field_in_order(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    indent: int | str | None,
    suffix: str,
    chunk: int,
) -> None:
    monkeypatch.setattr(readers, "_CHUNK_BYTES", chunk)
    data = json.dumps(ITEMS, indent=indent, ensure_ascii=chunk == 8).encode()
    path = write(tmp_path / f"a.json{suffix}", PACKERS[suffix](b"\xef\xbb\xbf\r\n " + data + b"\n"))
    assert read_json(path) == [item["text"] for item in ITEMS]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'[{"text": "a"}, 7]', "item 2: a row must be a JSON object; got 7"),
        (b'[{"text": "a"}, {"text": 7}]', "item 2: the field must hold a string; got 7"),
        (b'[{"text": "a"}, {"body": 7}]', "item 2: a row must have the field 'text'; got fields"),
        (b'[{"text": "a"}', "item 1 of the array must be whole JSON"),
        (b'[{"text": "a"},', "item 2 of the array must be whole JSON"),
        (b'[{"text": "a"}, {"text": "b', "item 2 of the array must be whole JSON"),
        (b'[{"text": "a"} {"text": "b"}]', "item 1 of the array must be whole JSON"),
        (b'[{"text": "a"},]', "item 2 of the array must be whole JSON"),
        (b'[{"text": "a"}]\n[{"text": "b"}]', "nothing may follow a JSON array"),
        (b'["a"]\n["b"]', "item 1: a row must be a JSON object; got a"),
        (b"[" * 100_000, "item 1 of the array must be whole JSON"),
        (b'[{"text": ' + b"9" * 5000 + b"}]", "item 1 of the array must be whole JSON"),
        (b'[{"text": "\xff"}]', "text must be UTF-8; got invalid start byte at byte 11"),
        (b'[{"text": "a\x00"}]', "text must not hold NUL; got NUL at byte 12"),
        (b"[]", "at least one non-empty document"),
        (b'{"data": [{"text": "a"}]}', r"fields \['data'\]\. Write .* jq -c '\.\[\"data\"\]\[\]'"),
        (b'{\n  "data": [\n{"text": "a"}]}', r"a\.json:1: a line must be JSON .*jq -c"),
        (b"[{\0".replace(b"[", b"\xff\xfe[\0"), r"rows must be UTF-8; .* looks like UTF-16"),
    ],
)
def test_json_that_is_no_array_of_rows_is_refused(
    tmp_path: Path, data: bytes, message: str
) -> None:
    with pytest.raises(CorpusError, match=message):
        read_json(write(tmp_path / "a.json", data))


def test_bad_items_of_an_array_are_skipped_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", b'[1, {"text": "good"}, {"text": "\\ud800"}, {}]')
    bad = BadRows()
    assert read_json(path, 3, bad) == ["good"]
    assert [m.partition(": ")[2][:6] for m in bad.first] == ["item 1", "item 3", "item 4"]


def test_bad_rows_are_counted_over_all_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.jsonl", '{"text": "good"}\r\n{\r\n')
    source = JsonLines(paths=(f"{tmp_path}/*.jsonl",), max_bad=2)
    bad = BadRows()
    assert list(iter_documents(source, bad)) == ["good", "good"]
    assert bad.count == 2
    assert [m.partition(": ")[0] for m in bad.first] == [
        f"{tmp_path}/a.jsonl:2",
        f"{tmp_path}/b.jsonl:2",
    ]
    with pytest.raises(CorpusError, match=r"at most 1 rows may be bad, first .*a\.jsonl:2: .*b"):
        list(iter_documents(source.model_copy(update={"max_bad": 1})))


@pytest.mark.full
def test_a_line_without_an_end_is_refused_before_memory_is_full(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as stream:
        stream.write(b'{"text": "good"}\n')
        for _ in range(1025):
            stream.write(b" " * (1 << 20))
    with pytest.raises(CorpusError, match=r"gz:2: a line must be at most 1073741824 bytes"):
        read_json(str(tmp_path / "a.jsonl.gz"))


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))))
def test_every_text_survives_json_lines(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("json") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in ["first", *texts]))
    assert read_json(str(path)) == ["first", *filter(None, texts)]
