"""Manifests, arrays and names that nobody means well: one typed line each, soon, without memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from umim_core.errors import ArtifactError
from umim_core.store.arrays import open_array
from umim_core.store.artifacts import (
    MANIFEST,
    canonical_json,
    read_json,
    read_manifest,
    safe_join,
    write_json,
)

TEXTS = {
    "brackets": "[" * 200_000 + "]" * 200_000,
    "braces": '{"a":' * 200_000,
    "digits": '{"kind":' + "9" * 5_001 + "}",
    "surrogate": '{"kind":"k","schema":1,"x":"\\ud800"}',
    "surrogate key": '{"kind":"k","\\udfff":1}',
    "nan": '{"kind":"k","schema":NaN}',
    "infinity": "[-Infinity]",
    "list": '["kind"]',
    "text": '"kind"',
    "null": "null",
    "empty": "",
    "nul": "\0",
    "torn": '{"kind":"k"',
    "kind of a list": '{"kind":["k"],"schema":1}',
    "files of a list": '{"kind":"k","schema":1,"files":[]}',
    "long kind": '{"kind":"' + "x" * 10**6 + '"}',
    "twice": '{"kind":"x","kind":"k","schema":1}',
    "twice inside": '{"kind":"k","schema":1,"files":{"a":{"bytes":1,"bytes":2}}}',
    "escapes": '{"kind":"\\u001b[2J"}',
}
PLACES: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "huge": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
    "latin": lambda path: path.write_bytes(b'{"kind":"\xe4"}'),
    "utf-16": lambda path: path.write_text('{"kind":"k"}', encoding="utf-16"),
    **{name: lambda path, text=text: path.write_text(text) for name, text in TEXTS.items()},
}


@pytest.mark.parametrize("kind", PLACES)
def test_a_hostile_manifest_is_one_typed_line(tmp_path: Path, kind: str) -> None:
    PLACES[kind](tmp_path / MANIFEST)
    with pytest.raises(ArtifactError) as found:
        read_manifest(tmp_path, kind="k", schema=1)
    assert len(str(found.value)) < 1_000 and str(found.value).isprintable()


@pytest.mark.parametrize("kind", [name for name in PLACES if name not in TEXTS])
def test_a_hostile_array_is_one_typed_line(tmp_path: Path, kind: str) -> None:
    PLACES[kind](tmp_path / "a.npy")
    with pytest.raises(ArtifactError) as found:
        open_array(tmp_path / "a.npy")
    assert str(found.value).isprintable()


@pytest.mark.parametrize("name", ["twice", "twice inside"])
def test_keys_given_twice_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.json").write_text(TEXTS[name], encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"'(kind|bytes)' is given twice"):
        read_json(tmp_path / "x.json")


def test_text_of_any_language_and_pairs_of_surrogates_are_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('["\\ud83d\\ude42", "grün"]', encoding="utf-8")
    assert read_json(tmp_path / "x.json") == ["🙂", "grün"]


@pytest.mark.parametrize("value", [float("nan"), "\ud800", {"\ud800": 1}, {1: 2, "a": 3}, {1}])
def test_what_could_not_be_read_is_not_written(tmp_path: Path, value: object) -> None:
    with pytest.raises(ArtifactError, match="holds only finite numbers"):
        write_json(tmp_path / "x.json", value)
    deep: object = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ArtifactError, match="holds only finite numbers"):
        canonical_json(deep)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["\ud800", "a\0b", "loop/x", "x" * 10**5, "x/" * 5_000 + ".."])
def test_names_that_are_none_are_refused_or_stay_inside(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    try:
        assert safe_join(tmp_path, name).is_relative_to(tmp_path)
    except ArtifactError as error:
        assert str(error).isprintable()
