"""From the names of a corpus to its documents: kinds, folders, patterns, rows, and what is refused.

Remote files lie in moto's S3 on loopback.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import logging
import lzma
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import HTTPError
from hypothesis import given
from hypothesis import strategies as st

from support.s3 import arrow_address, s3_files, s3_server
from umim_core.errors import ConfigError, CorpusError, UmimError
from umim_core.text.documents import BadRows
from umim_core.text.reading import Reading
from umim_core.text.sources import (
    DocumentSource,
    HubDataset,
    JsonLines,
    ParquetFiles,
    Source,
    TextFiles,
    TokenIds,
    expand,
    iter_documents,
    source_of,
    sources_of,
)
from umim_core.text.tokens import iter_token_pieces

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}
ROWS = "".join(json.dumps({"text": text}) + "\n" for text in ("one", "two"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, data: bytes | str = b"x") -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(data.encode() if isinstance(data, str) else data)
    return name


def texts(*names: str, **reading: object) -> list[str]:
    return read(source_of(names, Reading(**reading)))


def read(source: Source) -> list[str]:
    assert not isinstance(source, TokenIds)
    return list(iter_documents(source))


# Endings


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize(
    ("endings", "data", "documents"),
    [
        (".jsonl .ndjson .jsonlines .json .JSONL .Json", ROWS, ["one", "two"]),
        (".txt .text .md .markdown .rst .TXT .Md", "\ufeffein Wort", ["ein Wort"]),
    ],
)
def test_the_ending_says_the_kind_in_any_case(
    endings: str, data: str, documents: list[str], packer: str
) -> None:
    for ending in endings.split():
        for written in (packer, packer.upper()):
            name = write(f"a{ending}{written}", PACKERS[packer](data.encode()))
            assert texts(name) == documents


def test_an_absolute_source_is_found_from_any_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("set").mkdir()
    for name in ("a.txt", "set/rows.jsonl", "b.jsonl"):
        Path(name).write_text('{"text": "one"}\n', encoding="utf-8")
    np.save("c.npy", np.array([1], np.uint16))
    names = ("a.*", "b.jsonl", "set", "c.npy")
    sources = [source_of((name,)) for name in names]
    sources.append(HubDataset(name="set"))
    known = [source.digests() for source in sources]
    absolute = [source.absolute() for source in sources]
    monkeypatch.chdir("/")
    assert [source.digests() for source in absolute] == known
    elsewhere: list[Source] = [TextFiles(paths=("s3://bucket/key",)), HubDataset(name="owner/name")]
    assert [source.absolute() for source in elsewhere] == elsewhere


def test_arrays_and_tables_are_known_by_their_endings() -> None:
    for ending in (".parquet", ".pq", ".PARQUET"):
        pq.write_table(pa.table({"text": ["one", "two"]}), f"a{ending}")
        assert texts(f"a{ending}") == ["one", "two"]
    with open("a.NPY", "wb") as stream:
        np.save(stream, np.array([1], np.uint16))
    assert source_of(("a.NPY",)).kind == "ids"
    for name in ("owner/name", "owner/name-v1.5"):
        assert source_of((name,)) == HubDataset(name=name)


UNKNOWN = ("a.csv", "a.tsv", "a.log", "a.html", "a", "a.txt.part", "a.jsonl~", ".txt", "a.csv.gz")


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_ending_that_says_nothing_is_refused_by_name(name: str) -> None:
    write(name, ROWS)
    with pytest.raises(CorpusError, match=r"must end in \.txt, .*; got .*--kind text") as told:
        source_of((name,))
    assert f"got {name}." in str(told.value)
    if not name.endswith(".gz"):
        assert texts(name, kind="text") == [ROWS]
        assert texts(name, kind="jsonl") == ["one", "two"]


@pytest.mark.parametrize(
    ("packed", "says"),
    [
        (gzip.compress(b"x", mtime=0), r"packed by gzip: let its name end in \.gz"),
        (lzma.compress(b"x"), r"packed by xz"),
        (PACKERS[".zst"](b"x"), r"packed by zstd"),
        (b"PK\x03\x04\0\0\xff", r"packed by zip: unpack it"),
        (b"PAR1\0\0", r"like parquet"),
        ("text".encode("utf-16"), r"like UTF-16: convert it"),
    ],
)
@pytest.mark.parametrize("ending", ["txt", "jsonl"])
def test_what_a_file_looks_like_is_said(packed: bytes, says: str, ending: str) -> None:
    with pytest.raises(CorpusError, match=f"a.{ending}: .*{says}"):
        texts(write(f"a.{ending}", packed))


# Folders and patterns


def tree() -> None:
    """Six texts (one behind a linked folder), and everything else that may lie in a folder."""
    for name in ("a.txt", "B.TXT", "sub/c.text", "e.Md", "w[1] x\n.txt", "../real/d.txt"):
        write(f"d/{name}", name)
    for name in (".ipynb_checkpoints/a-checkpoint.txt", ".hidden.txt", "pic.png", "t.csv"):
        write(f"d/{name}", "not to be read")
    links = {"linked": "../real", "up": "..", "loop": ".", "sub/back": "../sub", "a2.txt": "a.txt"}
    for name, target in (links | {"broken.txt": "nowhere"}).items():
        Path("d", name).symlink_to(target)
    os.mkfifo("d/pipe.txt")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("d/socket.txt")


ALL = ["../real/d.txt", "B.TXT", "a.txt", "e.Md", "sub/c.text", "w[1] x\n.txt"]


@pytest.mark.parametrize(
    ("name", "documents", "left_out"),
    [
        ("d", ALL, "3 no regular file, 4 linked twice, 2 hidden, 1 .png, 1 .csv"),
        ("d/**", ALL, "3 no regular file, 4 linked twice, 2 hidden, 1 .png, 1 .csv"),
        ("d/*", [n for n in ALL if "/" not in n], "3 no regular file"),
        ("d/**/*.txt", ["../real/d.txt", "a.txt", "w[1] x\n.txt"], "1 written in another case"),
        ("d/*/c.*", ["sub/c.text"], None),
        ("d/w[[]1] *.txt", ["w[1] x\n.txt"], None),
        ("d/.ipynb*/*", ["not to be read"], None),
        ("d/w[1] x\n.txt", ["w[1] x\n.txt"], None),
    ],
    ids=repr,
)
def test_folders_and_patterns_are_read_whole_and_say_what_they_leave_out(
    name: str, documents: list[str], left_out: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    tree()
    with caplog.at_level(logging.WARNING, "umim.progress"):
        assert sorted(texts(name)) == sorted(documents)
        assert expand((name,), "text") and len(caplog.messages) <= 2
    said = caplog.messages[0] if caplog.messages else None
    if left_out is None:
        assert said is None
    else:
        assert said is not None and said.startswith(f"{name}: ")
        assert all(part in said for part in left_out.split(", ")), said


def test_matches_of_patterns_come_sorted_by_path_and_may_have_any_ending_that_is_said() -> None:
    for name in ("d/a.txt", "d/b.log", "d/c.jsonl", "b.txt", "a.txt", "z.md"):
        write(name, name)
    assert read(TextFiles(paths=("d",))) == texts("d", kind="text") == ["d/a.txt"]
    assert read(TextFiles(paths=("d/*.log", "d/a*"))) == ["d/a.txt", "d/b.log"]
    assert texts("d/*.log", kind="text") == ["d/b.log"]
    assert texts("z.md", "**/*.txt") == ["a.txt", "b.txt", "d/a.txt", "z.md"]


@pytest.mark.parametrize("second", ["d", "d/*", "link/a.txt", "d/x/../a.txt", "file://"])
def test_a_file_that_two_names_stand_for_is_refused(folder: Path, second: str) -> None:
    write("d/a.txt")
    Path("d/x").mkdir()
    Path("link").symlink_to("d")
    names = ("d/a.txt", f"file://{folder}/d/a.txt" if second == "file://" else second)
    with pytest.raises(CorpusError, match=r"must be named once; got .*a\.txt and .*a\.txt"):
        texts(*names)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_never_skipped_silently(caplog: pytest.LogCaptureFixture) -> None:
    write("d/a.txt"), write("d/sub/b.txt")
    for closed in (Path("d/sub"), Path("d/a.txt")):
        closed.chmod(0)
    try:
        with pytest.raises(CorpusError, match=r"a\.txt: the file must be readable"):
            texts("d")
        assert "1 without permission" in caplog.text
    finally:
        Path("d/sub").chmod(0o700)


REFUSED: list[tuple[str, str, str]] = [  # files, names, what is said
    *(
        (f"a.{end}", f"a.{end}", r"packed also in \.gz, .*\.bz2; got a.*Unpack it")
        for end in ("zip", "tar.gz", "txt.7z", "jsonl.lz4", "TGZ", "Z", "parquet.gz", "npy.xz")
    ),
    *(
        ("data/x", name, "a corpus file must exist")
        for name in ("a.csv", "a.txt", "data/a", "data/a.csv", "a.json", "./a", "wikitext", "-")
    ),
    ("e/x", "d", "a folder or pattern must give .*; got d, with nothing"),
    ("d/a.png d/.b.txt", "d", r"got d, with 1 hidden, 1 \.png\. Name files that end in"),
    ("d/a.txt d/b.jsonl d/c.json", "d", r"of one kind; got 1 text, 2 jsonl\. Name"),
    ("d/a.log", "d/*.log", r"must give .*; got d/\*\.log, with 1 \.log\. .*--kind jsonl"),
    ("d/a.log", "d/*.none", "a folder or pattern must give"),
    *(
        ("d/a.txt", f"{base}/{shape}", f"a corpus file must exist; got .*, with no folder {base}")
        for base in ("none", "none/sub", "d/none", "d/a.txt", "/none/sub")
        for shape in ("*", "*.txt", "**/*.txt", "*/a.txt")
    ),
    *(
        ("@tree", name, "must be a regular file; got")
        for name in ("d/pipe.txt", "d/socket.txt", "d/broken.txt", "/dev/null")
    ),
    ("a.npy b.npy", "a.npy b.npy", "a corpus of kind ids must be one name"),
    ("a", "o/n o/m", "a corpus of kind dataset must be one name"),
    ("a", "", "of one kind; got no name"),
    ("a.txt", "a.txt", "at least one non-empty document"),
]


@pytest.mark.parametrize(("files", "names", "message"), REFUSED)
def test_names_that_are_no_corpus_are_refused(files: str, names: str, message: str) -> None:
    Path("d").mkdir()
    if files == "@tree":
        tree()
    else:
        for file in files.split():
            write(file, "")
    with pytest.raises(CorpusError, match=message):
        texts(*names.split())


# Options


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.txt", "field split config max_bad"),
        ("a.npy", "field split config max_bad"),
        ("a.jsonl", "split config"),
        ("a.parquet", "split config"),
    ],
)
def test_an_option_without_effect_is_refused(name: str, options: str) -> None:
    write(name)
    for option in options.split():
        shown = option.replace("_", "-")
        with pytest.raises(ConfigError, match=f"--{shown} is of corpora of the kinds .*no effect"):
            texts(name, **{option: 0 if option == "max_bad" else "x"})


def test_options_reach_the_sources_that_take_them() -> None:
    write("a.jsonl"), write("b.txt")
    assert sources_of([("a.jsonl",), ("b.txt",)], Reading(field="body", max_bad=2)) == [
        JsonLines(paths=("a.jsonl",), field="body", max_bad=2),
        TextFiles(paths=("b.txt",)),
    ]
    options = {"field": "f", "split": "s", "config": "c", "max_bad": 1}
    whole = source_of(("a.txt",), Reading(kind="dataset", **options))
    assert whole == HubDataset(name="a.txt", **options)
    assert sources_of([]) == []
    for alone in (Reading("text"), Reading(field="x"), Reading(max_bad=0)):
        with pytest.raises(ConfigError, match="options of a corpus need one"):
            sources_of([], alone)
    for wrong in (Reading(field=""), Reading(max_bad=-1)):
        with pytest.raises(ConfigError, match=r"as it can be read; got (field|max_bad) must "):
            source_of(("a.jsonl",), wrong)


# Text files and JSON lines


def test_text_stays_but_for_the_byte_order_mark_and_empty_documents() -> None:
    write("a.txt", b"\xef\xbb\xbfone\r\ntwo\r\n\xef\xbb\xbf")
    write("b.txt", "")
    write("c.txt", "\ufeff")
    assert texts("a.txt", "b.txt", "c.txt") == ["one\r\ntwo\r\n\ufeff"]
    with pytest.raises(CorpusError, match="unexpected end of data at byte 0"):
        texts(write("torn.txt", b"\xef\xbb"))


@pytest.mark.parametrize("at", [0, (1 << 20) - 2, 1 << 20, (3 << 20) + 5])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"\xff", "invalid start byte"),
        (b"\xe4\xb8a", "invalid continuation"),
        (b"\xe4\xb8", "unexpected end of data"),
        (b"\0", "NUL"),
    ],
)
def test_bad_bytes_are_located_anywhere(at: int, bad: bytes, message: str) -> None:
    behind = b"" if "end" in message else b"y" * (1 << 20)
    write("a.txt", b"\xef\xbb\xbf" + b"x" * at + bad + behind)
    with pytest.raises(CorpusError, match=f"{message}.* at byte {at + 3}"):
        texts("a.txt")


ITEMS = [
    {"text": text, "n": [number, -1.5e-3, None, {}]}
    for number, text in enumerate(
        ("one", "two\nlines\u2028here", "Ω", '[,]{} \\" 世', "quote ' and \\")
    )
]


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("ascii_only", [False, True])
def test_json_lines_and_arrays_give_the_field_in_order(packer: str, ascii_only: bool) -> None:
    for ends in ("\n", "\r\n"):
        lines = [json.dumps(item, ensure_ascii=ascii_only) for item in ITEMS]
        packed = PACKERS[packer](("\ufeff" + ends.join([*lines, "", " "])).encode())
        assert texts(write(f"a.jsonl{packer}", packed)) == [item["text"] for item in ITEMS]
    for indent in (None, 0, 2, "\t"):
        data = json.dumps(ITEMS, indent=indent, ensure_ascii=ascii_only).encode()
        packed = PACKERS[packer](b"\xef\xbb\xbf\r\n " + data + b"\n")
        assert texts(write(f"a.json{packer}", packed)) == [item["text"] for item in ITEMS]
    alone = json.dumps(ITEMS[0], indent=2, ensure_ascii=ascii_only).encode()
    inner = b'{"first": [\n{"a": 1}\n], ' + alone[1:]
    for whole in (alone, inner):
        assert texts(write(f"b.json{packer}", PACKERS[packer](whole))) == [ITEMS[0]["text"]]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))))
def test_every_text_survives_json_lines(rows: list[str]) -> None:
    write("a.jsonl", "".join(json.dumps({"text": t}) + "\n" for t in ["first", *rows]))
    assert texts("a.jsonl") == ["first", *filter(None, rows)]


BAD_ROWS = {
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


def test_bad_lines_are_refused_with_file_and_line_or_skipped_and_counted() -> None:
    good = b'{"text": "good"}'
    for line, message in BAD_ROWS.values():
        with pytest.raises(CorpusError, match=rf"a\.jsonl:2: .*{message}"):
            texts(write("a.jsonl", good + b"\n" + line + b"\n"))
    for name in ("a.jsonl", "b.jsonl"):
        write(name, b"\r\n".join([good, *(line for line, _ in BAD_ROWS.values()), good]))
    bad, most = BadRows(), 2 * len(BAD_ROWS)
    source = JsonLines(paths=("*.jsonl",), max_bad=most)
    assert list(iter_documents(source, bad)) == ["good"] * 4
    assert bad.count == most and bad.first.startswith("a.jsonl:2: a line must be JSON")
    with pytest.raises(CorpusError, match=r"at most 17 rows may be bad, first a\.jsonl:2: .*b\.j"):
        read(source.model_copy(update={"max_bad": most - 1}))
    for torn in (b"{", b'{"a": [', b'{"text":', b'{"text": "x", '):  # no object over lines
        data = b"\n".join([torn, good, b"", good])
        assert texts(write("c.jsonl", data), max_bad=1) == ["good"] * 2
        with pytest.raises(CorpusError, match=r"c\.jsonl:1: a line must be JSON"):
            texts("c.jsonl")
    write("a.json", b'[1, {"text": "good"}, {"text": "\\ud800"}, {}]')
    bad = BadRows()
    assert list(iter_documents(JsonLines(paths=("a.json",), max_bad=3), bad)) == ["good"]
    assert bad == BadRows(3, "a.json: item 1: a row must be a JSON object")


@pytest.mark.parametrize("kind", ["txt", "jsonl", "json"])
@pytest.mark.parametrize("packer", [packer for packer in PACKERS if packer])
@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_a_torn_packed_file_is_an_error_even_where_bad_rows_are_allowed(
    kind: str, packer: str, keep: float
) -> None:
    lines = [f'{{"text": "{i * 7919 % 10007}"}}' for i in range(10_000)]
    data = ("[" + ",\n".join(lines) if kind == "json" else "\n".join(lines)).encode()
    packed = PACKERS[packer](data)
    write(f"a.{kind}{packer}", packed[: int(len(packed) * keep)])
    with pytest.raises(CorpusError, match=rf"a\.{kind}\{packer}: the file must be readable and"):
        texts(f"a.{kind}{packer}", max_bad=None if kind == "txt" else 10)


NO_ARRAY = "must be one whole JSON value"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'[{"text": "a"}, 7]', "item 2: a row must be a JSON object; got 7"),
        (b'[{"text": "a"}, {"body": 7}]', "item 2: a row must have the field 'text'; got fields"),
        (b'[{"text": "a"}', NO_ARRAY),
        (b'[{"text": "a"},]', NO_ARRAY),
        (b'[{"text": "a"}]\n[{"text": "b"}]', f"{NO_ARRAY}; got Extra data"),
        (b"[" * 100_000, NO_ARRAY),
        (b'[{"text": ' + b"9" * 5000 + b"}]", NO_ARRAY),
        (b'[{"text": "\xff"}]', "text must be UTF-8; got invalid start byte at byte 11"),
        (b'[{"text": "a\x00"}]', "text must not hold NUL; got NUL at byte 12"),
        (b"[]", "at least one non-empty document"),
        (b'{"data": [{"text": "a"}]}', r"fields \['data'\]\. Write .* jq -c '\.\[\"data\"\]\[\]'"),
        (b'{\n  "data": [\n{"text": "a"}]}', r"item 1: .* fields \['data'\]\. Write .* jq -c"),
        (b'{\n  "text": "a"\n}\n{\n}', f"{NO_ARRAY}; got Extra data"),
        (b"[{\0".replace(b"[", b"\xff\xfe[\0"), r"rows must be UTF-8; .* looks like UTF-16"),
    ],
)
def test_json_that_is_no_array_of_rows_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        texts(write("a.json", data))


@pytest.mark.full
@pytest.mark.parametrize("first", [b'{"text": "good"}\n', b"["])
def test_what_has_no_end_is_refused_before_memory_is_full(first: bytes) -> None:
    with gzip.open("a.jsonl.gz", "wb", compresslevel=1) as stream:
        stream.write(first)
        for _ in range(1025):
            stream.write(b" " * (1 << 20))
    with pytest.raises(CorpusError, match=r"gz.* must be at most 1073741824"):
        texts("a.jsonl.gz")


# Tables and data sets


def write_table(column: pa.Array, name: str = "text") -> str:
    pq.write_table(pa.table({"other": range(len(column)), name: column}), "a.parquet")
    return "a.parquet"


def test_parquet_gives_the_column_in_order() -> None:
    rows = [f"text {i % 7} Ω" for i in range(1000)]
    kinds = pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())
    for kind in kinds:
        assert texts(write_table(pa.array(rows).cast(kind))) == rows
    write_table(pa.array([*["x"] * 300, None, "y"]))
    with pytest.raises(CorpusError, match=r"a\.parquet: row 300: the field must hold a string"):
        texts("a.parquet")
    assert texts("a.parquet", max_bad=1) == [*["x"] * 300, "y"]


@pytest.mark.parametrize(
    ("column", "name", "message"),
    [
        (pa.array(["x"]), "body", r"must be a column 'text'; got columns \['other', 'body'\]"),
        (pa.array([1]), "text", "column 'text' must hold strings; got int64"),
        (pa.array([b"x"]), "text", "column 'text' must hold strings; got binary"),
    ],
)
def test_a_wrong_column_is_refused(column: pa.Array, name: str, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        texts(write_table(column, name))


@pytest.mark.parametrize("keep", [0, 10, -20])
def test_a_torn_parquet_file_is_refused(keep: int) -> None:
    path = Path(write_table(pa.array(["x"] * 100)))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorpusError, match=r"a\.parquet: the file must be readable and whole"):
        texts(str(path))


def test_a_field_with_dots_lies_inside_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", Path("cache"))
    # a record of lists, as CodeContests has it, and a list of records
    lists = [
        {"by": [1, 3], "code": ["a = 1", "b"]},
        {"by": [], "code": []},
        {"by": [2], "code": ["c"]},
    ]
    records = [[{"code": "a = 1"}, {"code": "b"}], [], [{"code": "c"}]]
    lines = [{"one": row, "two": items} for row, items in zip(lists, records, strict=True)]
    write("programs/train.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    for field in ("one.code", "two.code"):
        assert read(HubDataset(name="programs", field=field)) == ["a = 1", "b", "c"]
    with pytest.raises(CorpusError, match="a row must have the field 'text'"):
        read(HubDataset(name="programs", field="one.text"))
    with pytest.raises(CorpusError, match=r"be a column 'three'; got columns \['one', 'two'\]"):
        read(HubDataset(name="programs", field="three.code"))


@pytest.mark.parametrize("offline", [True, False])
def test_a_data_set_out_of_reach_says_what_to_do_at_once(
    monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(CorpusError, match=r"'no/such' must be loadable.*offline, name a local"):
        read(HubDataset(name="no/such"))
    assert time.monotonic() - began < 10  # asked again and again, the hub took half a minute
    assert datasets.config.HF_HUB_OFFLINE is offline


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_data_set_is_known_by_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit is not asked for; without an answer nothing else says which data there are."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as hub:
        address = f"http://127.0.0.1:{hub.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        hub.setblocking(False)
        assert HubDataset(name="owner/name", revision=COMMIT).digests() == [COMMIT]
        with pytest.raises(BlockingIOError):
            hub.accept()
    for revision in (None, "v1.0", "main", COMMIT[:7], COMMIT + "0"):
        pinned = f" at revision {revision}" if revision else ""
        message = f"pinned by a commit of 40 hex digits; got owner/name{pinned}\\. Name"
        with pytest.raises(CorpusError, match=message) as told:
            HubDataset(name="owner/name", revision=revision).digests()
        assert isinstance(told.value.__cause__, HTTPError), "a connection was tried"
    for name in ("o/a--b", "o/a..b"):  # the hub's library refuses them before it asks
        with pytest.raises(CorpusError, match="; got o/a"):
            HubDataset(name=name).digests()


# Remote files

USER, SECRET = "AKIDEXAMPLE", "sEcReT/wOrD"
Address = Callable[[str], str]


@pytest.fixture(scope="module")
def remote() -> Iterator[Address]:
    """Addresses of objects, with credentials in them."""
    table = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": [f"row {i}" for i in range(600)], "n": range(600)}), table)
    parquet = table.getvalue().to_pybytes()
    lines = [json.dumps({"text": text}) for text in ("one", "zwölf")]
    objects = {
        "books/a.txt": b"\xef\xbb\xbffirst\r\n",
        "books/b c.txt": "zweites Büch".encode(),
        "books/deep/d.txt": b"fourth",
        "books/e.md": b"no text file",
        "rows.jsonl.gz": gzip.compress("\n".join(lines).encode(), mtime=0),
        "bad.jsonl.gz": gzip.compress(b'{"text": "good"}\n{'),
        "torn.jsonl.gz": gzip.compress(b'{"text": "x"}\n' * 9000)[:-9],
        "table.parquet": parquet,
        "torn.parquet": parquet[:-9],
        "long.txt": b"some words " * 1_000_000,
        "empty.txt": b"",
        "ids.npy": b"x",
    }
    with s3_server() as settings:
        files = s3_files(settings)
        for name, data in objects.items():
            files.pipe(f"umim/{name}", data)
        yield lambda path: arrow_address(settings, path, f"{USER}:sEcReT%2FwOrD")


def assert_no_secret(text: str | BaseException) -> None:
    """Nothing that a traceback would print names the user or the password."""
    shown = text if isinstance(text, str) else "".join(traceback.format_exception(text))
    assert not any(secret in shown for secret in (USER, SECRET, "sEcReT"))


@pytest.mark.parametrize(
    ("pattern", "documents"),
    [
        ("books/a.txt", ["first\r\n"]),
        ("books/*.txt", ["first\r\n", "zweites Büch"]),
        ("books/**/*.txt", ["first\r\n", "zweites Büch", "fourth"]),
        ("b*/deep/*.txt", ["fourth"]),
        ("rows.jsonl.gz", ["one", "zwölf"]),
        ("table.parquet", [f"row {i}" for i in range(600)]),
    ],
)
def test_remote_files_are_read_as_local_ones(
    remote: Address, pattern: str, documents: list[str]
) -> None:
    source = source_of((remote(pattern),))
    assert read(source) == documents
    assert source.digests() == [file.sha256() for file in source.files()]


def test_a_remote_file_is_read_in_large_ranges(
    remote: Address, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "werkzeug"):
        assert texts(remote("long.txt")) == ["some words " * 1_000_000]
    assert 1 < sum("GET /umim/long.txt" in line for line in caplog.messages) < 6
    (file,) = expand((remote("long.txt"),))
    assert file.sha256() == hashlib.sha256(b"some words " * 1_000_000).hexdigest()


REMOTE_FAULTS: dict[str, tuple[type[TextFiles | JsonLines | ParquetFiles], str]] = {
    "none.txt": (TextFiles, r"a corpus file must exist; got s3://\*\*\*@umim/none"),
    "books": (TextFiles, r"must be that of a file; .* s3://\*\*\*@umim/books/\*\.txt"),
    "*.none": (TextFiles, "a folder or pattern must give"),
    "../none/*.txt": (TextFiles, "a folder or pattern must give"),
    "bad.jsonl.gz": (JsonLines, r"@umim/bad\.jsonl\.gz:2: a line must be JSON"),
    "torn.jsonl.gz": (JsonLines, r"torn\.jsonl\.gz: the file must be readable and"),
    "torn.parquet": (ParquetFiles, "torn.parquet: the file must be readable"),
    "a b.txt": (TextFiles, "the address must be one that Arrow's file systems"),
    "empty.txt": (TextFiles, "at least one non-empty document"),
}


@pytest.mark.parametrize("path", REMOTE_FAULTS)
def test_remote_faults_name_the_file_and_no_secret(remote: Address, path: str) -> None:
    kind, message = REMOTE_FAULTS[path]
    address = remote(path).replace("umim/../", "")
    with pytest.raises(CorpusError, match=message) as caught:
        read(kind(paths=(address,)))
    assert_no_secret(caught.value)


def test_no_secret_is_shown_where_rows_are_skipped_or_ids_are_remote(remote: Address) -> None:
    bad = BadRows()
    source: DocumentSource = JsonLines(paths=(remote("bad.jsonl.gz"),), max_bad=1)
    assert list(iter_documents(source, bad)) == ["good"]
    assert_no_secret(bad.first)
    with pytest.raises(CorpusError, match=r"ids\.npy: .* got an address") as caught:
        list(iter_token_pieces(TokenIds(path=remote("ids.npy")), None))
    assert_no_secret(caught.value)
    source = TextFiles(paths=("s3://AK:SK@bucket/key?region=x", "local.txt"))
    assert source.model_dump(mode="json")["paths"] == ["s3://***@bucket/key?region=x", "local.txt"]
    assert source.model_dump()["paths"] == source.paths


@pytest.mark.full
def test_a_store_that_does_not_answer_is_named_without_secrets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"s3://{USER}:x@umim/a.txt?endpoint_override=127.0.0.1:{port}&scheme=http"
    with pytest.raises(UmimError, match=r"s3://\*\*\*@umim/a\.txt: the file must be rea") as found:
        expand((address,))
    assert_no_secret(found.value)
