"""Names of a corpus: the kind by the ending, folders and patterns, and what is left out."""

from __future__ import annotations

import gzip
import json
import logging
import lzma
import os
import socket
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.packers import PACKERS
from umim_core.errors import ConfigError, CorpusError, UmimError
from umim_core.text.files import expand
from umim_core.text.readers import iter_documents
from umim_core.text.sources import HubDataset, JsonLines, Reading, TextFiles, source_of, sources_of

ROWS = "".join(json.dumps({"text": text}) + "\n" for text in ("one", "two"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, data: bytes | str = b"x") -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(data.encode() if isinstance(data, str) else data)
    return name


def texts(*names: str, reading: Reading = Reading()) -> list[str]:  # noqa: B008  frozen
    source = source_of(names, reading)
    return list(iter_documents(source))


# Endings


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("ending", [".jsonl", ".ndjson", ".jsonlines", ".json", ".JSONL", ".Json"])
def test_json_lines_are_known_by_every_ending(ending: str, packer: str) -> None:
    for written in (packer, packer.upper()):
        name = write(f"a{ending}{written}", PACKERS[packer](ROWS.encode()))
        assert texts(name) == ["one", "two"]


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("ending", [".txt", ".text", ".md", ".markdown", ".rst", ".TXT", ".Md"])
def test_text_is_known_by_every_ending(ending: str, packer: str) -> None:
    data = PACKERS[packer]("\ufeffein Wort".encode())
    assert texts(write(f"a{ending}{packer.upper()}", data)) == ["ein Wort"]


@pytest.mark.parametrize("ending", [".parquet", ".pq", ".PARQUET"])
def test_parquet_is_known_by_every_ending(ending: str) -> None:
    pq.write_table(pa.table({"text": ["one", "two"]}), f"a{ending}")
    assert texts(f"a{ending}") == ["one", "two"]


def test_token_ids_are_known_in_any_case() -> None:
    with open("a.NPY", "wb") as stream:
        np.save(stream, np.array([1], np.uint16))
    assert source_of(("a.NPY",)).kind == "ids"


@pytest.mark.parametrize(
    "name", ["a.csv", "a.tsv", "a.log", "a.html", "a", "a.txt.part", "a.jsonl~", ".txt", "a.csv.gz"]
)
def test_an_ending_that_says_nothing_is_refused_by_name(name: str) -> None:
    write(name, ROWS)
    with pytest.raises(CorpusError, match=r"must end in \.txt, .*; got .*--kind text") as told:
        source_of((name,))
    assert f"got {name}." in str(told.value)
    if not name.endswith(".gz"):
        assert texts(name, reading=Reading("text")) == [ROWS]
        assert texts(name, reading=Reading("jsonl")) == ["one", "two"]


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "a.txt.7z", "a.jsonl.lz4", "a.TGZ", "a.Z"])
def test_other_packers_are_refused_by_name(name: str) -> None:
    with pytest.raises(CorpusError, match=r"must end in \.gz, .*\.bz2; got a.*Unpack it"):
        source_of((write(name),))


@pytest.mark.parametrize("name", ["a.parquet.gz", "a.npy.xz"])
def test_what_is_read_at_any_place_must_not_be_packed(name: str) -> None:
    with pytest.raises(CorpusError, match="file must not be packed"):
        source_of((write(name),))


@pytest.mark.parametrize("name", ["a.csv", "a.txt", "data/a", "data/a.csv", "a.json", "./a"])
def test_a_missing_file_is_no_data_set(name: str) -> None:
    Path("data").mkdir()
    with pytest.raises(CorpusError, match="a corpus file must exist"):
        texts(name)


@pytest.mark.parametrize("name", ["owner/name", "wikitext", "owner/name-v1.5"])
def test_a_name_of_the_hub_is_a_data_set(name: str) -> None:
    assert source_of((name,)) == HubDataset(name=name)


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
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_what_a_file_looks_like_is_said(packed: bytes, says: str, kind: str) -> None:
    ending = {"text": "txt", "jsonl": "jsonl"}[kind]
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
    ("name", "read", "left_out"),
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
    name: str, read: list[str], left_out: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    tree()
    with caplog.at_level(logging.WARNING, "umim.progress"):
        found = source_of((name,))
        assert sorted(iter_documents(found)) == sorted(read)
        assert isinstance(found, TextFiles)
        assert [f.location for f in expand((name,), "text")] != [] and len(caplog.messages) <= 2
    said = caplog.messages[0] if caplog.messages else None
    if left_out is None:
        assert said is None
    else:
        assert said is not None and said.startswith(f"{name}: ")
        assert all(part in said for part in left_out.split(", ")), said


def test_a_recipe_takes_folders_and_every_match_of_a_pattern() -> None:
    for name in ("d/a.txt", "d/b.log", "d/c.jsonl"):
        write(name, name)
    assert list(iter_documents(TextFiles(paths=("d",)))) == ["d/a.txt"]
    assert list(iter_documents(TextFiles(paths=("d/*.log", "d/a*")))) == ["d/a.txt", "d/b.log"]
    assert texts("d", reading=Reading("text")) == ["d/a.txt"]
    assert texts("d/*.log", reading=Reading("text")) == ["d/b.log"]


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        ([], "d", "a folder must hold files that end in .*; got d, with nothing"),
        (["d/a.png", "d/.b.txt"], "d", r"got d, with 1 hidden, 1 \.png\. Name the files"),
        (["d/a.txt", "d/b.jsonl", "d/c.json"], "d", r"of one kind; got 1 text, 2 jsonl\. Name"),
        (
            ["d/a.log"],
            "d/*.log",
            r"must match a file of a known kind; got d/\*\.log, which",
        ),
        (["d/a.log"], "d/*.none", "a pattern must match a file; got"),
        (["d/a.txt"], "none/*", "a pattern must match a file; got"),
    ],
)
def test_folders_and_patterns_of_no_one_kind_are_refused(
    files: list[str], name: str, message: str
) -> None:
    Path("d").mkdir()
    for file in files:
        write(file)
    with pytest.raises(CorpusError, match=message):
        source_of((name,))


@pytest.mark.parametrize("name", ["d/pipe.txt", "d/socket.txt", "d/broken.txt", "/dev/null"])
def test_what_is_no_regular_file_is_refused(name: str) -> None:
    tree()
    with pytest.raises(CorpusError, match="must be a regular file; got"):
        texts(name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("mode", ["file", "folder"])
def test_what_may_not_be_read_is_never_skipped_silently(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    write("d/a.txt"), write("d/sub/b.txt")
    closed = Path("d/a.txt" if mode == "file" else "d/sub")
    closed.chmod(0)
    try:
        if mode == "file":
            with pytest.raises(CorpusError, match=r"a\.txt: the file must be readable"):
                texts("d")
        else:
            assert texts("d") == ["x"]
            assert "1 without permission" in caplog.text
    finally:
        closed.chmod(0o700)


@pytest.mark.parametrize("second", ["d", "d/*", "link/a.txt", "d/x/../a.txt", "file://"])
def test_a_file_that_two_names_stand_for_is_refused(folder: Path, second: str) -> None:
    write("d/a.txt")
    Path("d/x").mkdir()
    Path("link").symlink_to("d")
    names = ("d/a.txt", f"file://{folder}/d/a.txt" if second == "file://" else second)
    with pytest.raises(CorpusError, match=r"must be named once; got .*a\.txt and .*a\.txt"):
        texts(*names)


# Options


@pytest.mark.parametrize(
    ("name", "option"),
    [
        *(("a.txt", option) for option in ("field", "split", "config", "max_bad")),
        *(("a.npy", option) for option in ("field", "split", "config", "max_bad")),
        *(("a.jsonl", option) for option in ("split", "config")),
        *(("a.parquet", option) for option in ("split", "config")),
    ],
)
def test_an_option_without_effect_is_refused(name: str, option: str) -> None:
    reading = Reading(**{option: 0 if option == "max_bad" else "x"})  # type: ignore[arg-type]
    shown = option.replace("_", "-")
    with pytest.raises(ConfigError, match=f"--{shown} is of corpora of the kinds .*no effect"):
        source_of((name,), reading)


def test_options_reach_the_sources_that_take_them() -> None:
    found = sources_of([("a.jsonl",), ("b.txt",)], Reading(field="body", max_bad=2))
    assert found == [
        JsonLines(paths=("a.jsonl",), field="body", max_bad=2),
        TextFiles(paths=("b.txt",)),
    ]
    assert source_of(("o/n",), Reading(default_split="test")) == HubDataset(
        name="o/n", split="test"
    )
    whole = Reading(kind="dataset", field="f", split="s", config="c", max_bad=1)
    assert source_of(("a.txt",), whole) == HubDataset(
        name="a.txt", field="f", split="s", config="c", max_bad=1
    )


@pytest.mark.parametrize("reading", [Reading("text"), Reading(field="x"), Reading(max_bad=0)])
def test_options_without_a_corpus_are_refused(reading: Reading) -> None:
    assert sources_of([]) == []
    with pytest.raises(ConfigError, match="options of a corpus need one"):
        sources_of([], reading)


@pytest.mark.parametrize(
    ("names", "reading"),
    [
        (("a.npy", "b.npy"), Reading()),
        (("o/n", "o/m"), Reading()),
        ((), Reading()),
        (("a.jsonl",), Reading(field="")),
        (("a.jsonl",), Reading(max_bad=-1)),
    ],
)
def test_names_that_are_no_source_are_refused(names: tuple[str, ...], reading: Reading) -> None:
    with pytest.raises(UmimError):
        source_of(names, reading)
