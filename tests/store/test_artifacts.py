"""Artifacts: canonical JSON, manifests that notice every change, publication, arrays.

What nobody means well is one typed line, soon and without memory.
"""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.pickle_bomb import PickleBomb
from umim_core.errors import ArtifactError
from umim_core.store.arrays import open_array, save_array
from umim_core.store.artifacts import (
    MANIFEST,
    canonical_json,
    directory_digest,
    read_json,
    read_manifest,
    safe_join,
    sha256_file,
    write_json,
    write_manifest,
)
from umim_core.store.disk import refusals_named
from umim_core.store.publication import (
    build_once,
    check_absent,
    give_name,
    publish_directory,
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abü/", max_size=3), inner),
    max_leaves=10,
)


def artifact(directory: Path) -> Path:
    (directory / "deep").mkdir(parents=True)
    (directory / "a.txt").write_text("alpha")
    (directory / "deep" / "b.bin").write_bytes(bytes(range(256)))
    write_manifest(directory, kind="stage", schema=3, body={"seed": 17, "name": "grün"})
    return directory


def read(directory: Path) -> dict[str, object]:
    return read_manifest(directory, kind="stage", schema=3)


@given(value=JSON)
def test_canonical_json_reads_back_and_ignores_the_order_of_keys(value: object) -> None:
    text = canonical_json(value)
    assert json.loads(text) == value
    if isinstance(value, dict):
        assert canonical_json(dict(reversed(value.items()))) == text
    dense = canonical_json({"b": [1, 2.5, None], "a": {"ü": True}})
    assert dense == '{"a":{"ü":true},"b":[1,2.5,null]}'


DEEP: object = []
for _ in range(100_000):
    DEEP = [DEEP]
NO_JSON = [
    *(math.nan, math.inf, -math.inf, {"a": [math.nan]}, {1, 2}, b"bytes", Path("x"), {(1, 2): 3}),
    *("\ud800", {"\ud800": 1}, {1: 2, "a": 3}, DEEP),
]


@pytest.mark.parametrize("value", NO_JSON, ids=lambda value: type(value).__name__)
def test_what_json_does_not_have_is_not_written(tmp_path: Path, value: object) -> None:
    with pytest.raises(ArtifactError, match="only finite numbers, strings, lists and mappings"):
        write_json(tmp_path / "x.json", value)
    assert list(tmp_path.iterdir()) == []


def test_json_files_round_trip_and_leave_nothing_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.json"
    write_json(path, {"b": 1, "a": "ü"})
    assert path.read_bytes() == '{"a":"ü","b":1}\n'.encode()
    assert read_json(path) == {"a": "ü", "b": 1}
    assert list(path.parent.iterdir()) == [path]
    path.write_text('["\\ud83d\\ude42", "grün"]', encoding="utf-8")
    assert read_json(path) == ["🙂", "grün"]


# Manifests


def test_a_manifest_reads_back_with_its_body(tmp_path: Path) -> None:
    record = read(artifact(tmp_path / "x"))
    assert (record["seed"], record["name"]) == (17, "grün")
    assert record["digest"] == directory_digest(tmp_path / "x")
    files = record["files"]
    assert isinstance(files, dict)
    assert files["deep/b.bin"]["bytes"] == 256
    assert set(files) == {"a.txt", "deep/b.bin"}


def test_the_digest_covers_names_and_contents_and_not_the_manifest(tmp_path: Path) -> None:
    one, two = artifact(tmp_path / "one"), artifact(tmp_path / "two")
    write_manifest(two, kind="stage", schema=3, body={"seed": 99})
    assert directory_digest(one) == directory_digest(two)
    (two / "a.txt").rename(two / "c.txt")
    assert directory_digest(one) != directory_digest(two)
    (one / "a.txt").write_text("alphA")
    assert len({directory_digest(one), directory_digest(two)}) == 2


def _edit(old: str, new: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        manifest = path / "manifest.json"
        text = manifest.read_text()
        assert text.count(old) == 1
        manifest.write_text(text.replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda path: (path / "a.txt").write_text("alpha +"),
            r"a\.txt must have 5 bytes; got 7",
        ),
        (lambda path: (path / "a.txt").write_text("alphA"), r"a\.txt must have the SHA-256 in its"),
        (lambda path: (path / "deep" / "extra").touch(), r"manifest lists; got \['deep/extra'\]"),
        (lambda path: (path / "deep" / "b.bin").unlink(), r"lists; got \['deep/b\.bin'\]"),
        (lambda path: (path / "manifest.json").unlink(), r"manifest\.json must exist"),
        (lambda path: shutil.rmtree(path), r"manifest\.json must exist"),
        (_edit('"seed":17', '"seed":18'), "must be as it was written; got another checksum"),
        (_edit('"bytes":256', '"bytes":257'), "must be as it was written"),
        (_edit('"schema":3', '"schema":4'), "must have schema 3; got 4"),
        (_edit('"schema":3', '"schema":"3"'), "must have schema 3; got 3"),
        (_edit('"kind":"stage"', '"kind":"rules"'), "an artifact of kind 'stage'; got rules"),
        (lambda path: write_json(path / "manifest.json", [1]), "kind 'stage'; got list"),
        (
            lambda path: write_json(path / "manifest.json", {"kind": "stage", "schema": 3}),
            "must be as",
        ),
    ],
)
def test_every_change_is_noticed(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    path = artifact(tmp_path / "x")
    read(path)
    change(path)
    with pytest.raises(ArtifactError, match=message):
        read(path)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/../../x", "/etc/passwd", "a/../..", "link/x", "link", "a\0b"]
)
def test_names_cannot_leave_the_root(tmp_path: Path, name: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "link").symlink_to(outside)
    with pytest.raises(ArtifactError, match="name must stay inside its root"):
        safe_join(root, name)
    for odd in ("\ud800", "loop/x", "x" * 10**5, "x/" * 5_000 + ".."):
        (root / "loop").unlink(missing_ok=True)
        (root / "loop").symlink_to("loop")
        try:
            assert safe_join(root, odd).is_relative_to(root)
        except ArtifactError as error:
            assert str(error).isprintable()


@pytest.mark.parametrize("name", ["README.md", "LICENSE", ".gitattributes", ".DS_Store"])
def test_a_page_beside_an_artifact_changes_nothing_unless_it_is_listed(
    tmp_path: Path, name: str
) -> None:
    before = read(artifact(tmp_path / "x"))
    (tmp_path / "x" / name).write_text("about")
    assert read(tmp_path / "x") == before
    write_manifest(tmp_path / "x", kind="stage", schema=3, body={})
    (tmp_path / "x" / name).write_text("other")
    with pytest.raises(ArtifactError, match="must have the SHA-256"):
        read(tmp_path / "x")


# Hostile files

TEXTS = {
    "brackets": "[" * 200_000 + "]" * 200_000,
    "digits": '{"kind":' + "9" * 5_001 + "}",
    "surrogate": '{"kind":"k","schema":1,"x":"\\ud800"}',
    "nan": '{"kind":"k","schema":NaN}',
    "list": '["kind"]',
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


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["fifo", "loop", "device", "dangling"])
def test_what_is_no_file_is_no_part_of_an_artifact(tmp_path: Path, kind: str) -> None:
    path = artifact(tmp_path / "x")
    (path / "a.txt").unlink()
    PLACES[kind](path / "a.txt")
    for _ in range(2):  # also where its manifest does not list it
        with pytest.raises(ArtifactError, match=r"its manifest lists; got \['a\.txt'\]"):
            read(path)
        write_manifest(path, kind="stage", schema=3, body={})


@pytest.mark.parametrize("kind", PLACES)
def test_a_hostile_manifest_or_array_is_one_typed_line(tmp_path: Path, kind: str) -> None:
    for name in (MANIFEST, "a.npy"):
        PLACES[kind](tmp_path / name)
    for read in (
        lambda: read_manifest(tmp_path, kind="k", schema=1),
        lambda: open_array(tmp_path / "a.npy"),
    ):
        with pytest.raises(ArtifactError) as found:
            read()
        assert len(str(found.value)) < 1_000 and str(found.value).isprintable()
    if "twice" in kind:
        with pytest.raises(
            ArtifactError, match=r"json must be readable JSON.*'(kind|bytes)' is gi"
        ):
            read_json(tmp_path / MANIFEST)


# Publication


def everything(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*"))


def test_a_failing_build_leaves_nothing(tmp_path: Path) -> None:
    def build(out: Path) -> None:
        (out / "half").write_text("1")
        assert not (tmp_path / "x").exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish_directory(tmp_path / "x", build)
    assert everything(tmp_path) == []


def test_a_published_directory_is_whole_and_alone_and_is_not_built_again(tmp_path: Path) -> None:
    place, built = tmp_path / "new" / "x", list[Path]()
    publish_directory(place, lambda out: (out / "f").write_text("1"))
    with pytest.raises(ArtifactError, match=r"output directory must not exist; got .*x"):
        publish_directory(place, built.append)
    assert built == []
    assert everything(tmp_path) == ["new", "new/x", "new/x/f"]


def test_what_another_builder_removes_while_it_is_read_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built() -> bool:
        fill = partial(write_json, value=1)
        place = tmp_path / "x"
        return build_once(place, "k", lambda out: fill(out / "f"), kind="k", schema=1).executed

    def hashed(path: Path) -> str:
        if removed:
            shutil.rmtree(removed.pop())
        return sha256_file(path)

    assert [built(), built()] == [True, False]
    removed = [tmp_path / "x"]
    monkeypatch.setattr("umim_core.store.artifacts.sha256_file", hashed)
    assert [built(), built()] == [True, False]


def test_a_call_killed_before_its_result_had_a_name_goes_on(tmp_path: Path) -> None:
    def build(out: Path) -> None:
        part = out / "state" / "part"
        build_once(part, "p", lambda to: write_json(to / "f", 1), kind="p", schema=1)

    def built() -> bool:
        place = tmp_path / "x"
        return build_once(place, "k", build, kind="k", schema=1, resumable=True).executed

    with pytest.MonkeyPatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr("umim_core.store.publication.give_name", killed_once(give_name))
        built()
    (part,) = tmp_path.glob("x.partial/**/part")
    shutil.rmtree(part)  # it must be built again, beside the manifest of the whole
    assert [built(), built()] == [True, False]


def killed_once(act: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
    """Do as a function does, until a whole folder gets its name."""

    def killed(folder: Path, place: Path) -> None:
        if place.name == "x":
            raise KeyboardInterrupt
        act(folder, place)

    return killed


@pytest.mark.parametrize("content", ["// of a browser\n{}", '{"name": "extension"}'])
def test_another_programs_manifest_is_no_result(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST).write_text(content)
    publish_directory(tmp_path / "x", lambda out: (out / "f").write_text("1"))
    assert everything(tmp_path) == [MANIFEST, "x", "x/f"]


def test_a_full_disk_is_told_while_others_remove_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = os.scandir

    def late(at: Path) -> Any:
        if at != tmp_path:
            os.rmdir(at)
        return scan(at)

    (tmp_path / "of another").mkdir()
    monkeypatch.setattr(os, "scandir", late)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(ArtifactError, match="No space"), refusals_named(tmp_path, folder=tmp_path):
        raise full


def test_a_parent_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = "must be writable; got Not a directory"
    with pytest.raises(ArtifactError, match=r"file \(0 bytes\) must be writable; got File e"):
        publish_directory(tmp_path / "file" / "x", lambda out: None)
    for long in ("x" * 250, "x" * 300):  # the lock beside it has a longer name
        with pytest.raises(ArtifactError, match="must be writable; got File name too long"):
            check_absent(tmp_path / long)
    with pytest.raises(ArtifactError, match=rf"file/x\.json \(3 bytes\) {refused}"):
        write_json(tmp_path / "file" / "x.json", {})
    with pytest.raises(ArtifactError, match=rf"file/a\.npy \(152 bytes\) {refused}"):
        save_array(tmp_path / "file" / "a.npy", np.zeros(3))


# Arrays


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint64, np.float32, np.bool_])
@pytest.mark.parametrize("shape", [(0,), (7,), (3, 4), (2, 0), ()])
def test_arrays_are_those_of_numpy_and_come_back_read_only(
    tmp_path: Path, dtype: type[np.generic], shape: tuple[int, ...]
) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    np.save(tmp_path / "numpy.npy", array)
    found = open_array(tmp_path / "numpy.npy")
    assert type(found) is np.ndarray and not found.flags.writeable
    assert (found.dtype, found.shape, found.tolist()) == (array.dtype, shape, array.tolist())
    if shape:
        save_array(tmp_path / "ours.npy", array)
        assert (tmp_path / "ours.npy").read_bytes() == (tmp_path / "numpy.npy").read_bytes()


def _declare(shape: str) -> bytes:
    header = f"{{'descr': '<u8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(640)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_a_file_that_is_no_array_is_refused_and_no_pickle_is_run(tmp_path: Path) -> None:
    path, fired = tmp_path / "x.npy", tmp_path / "fired"
    raw = pickle.dumps(PickleBomb(fired))
    pickle.loads(raw)  # noqa: S301  the bomb works
    fired.unlink()
    np.save(path, np.arange(9), allow_pickle=False)
    whole = path.read_bytes()
    np.save(path, np.array([PickleBomb(fired)], dtype=object), allow_pickle=True)
    objects = path.read_bytes()
    np.savez(tmp_path / "archive.npz", a=np.arange(3))
    contents = [
        *(whole[:cut] for cut in (0, 5, 9, 40, 127, 130)),
        whole + b"\0",
        *(objects, raw, (tmp_path / "archive.npz").read_bytes(), b"\x93NUMPY\x01\x00\xff\xffshort"),
        *map(_declare, (f"({1 << 60},)", f"({1 << 70},)", "(5", "(5,), 7: 8")),
    ]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match=r"x\.npy must be an \.npy array"):
            open_array(path)
    path.unlink()
    with pytest.raises(ArtifactError, match=r"x\.npy must be an \.npy array; got .*No such file"):
        open_array(path)
    assert not fired.exists()
