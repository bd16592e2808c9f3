"""Canonical JSON, manifests that notice every change, names that stay inside, publication."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umim_core.errors import ArtifactError
from umim_core.store.artifacts import (
    canonical_json,
    directory_digest,
    read_json,
    read_manifest,
    safe_join,
    write_json,
    write_manifest,
)
from umim_core.store.publication import publish_directory

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


def test_canonical_json_is_sorted_and_dense() -> None:
    assert canonical_json({"b": [1, 2.5, None], "a": {"ü": True}}) == (
        '{"a":{"ü":true},"b":[1,2.5,null]}'
    )


@given(value=JSON)
def test_canonical_json_reads_back_and_ignores_the_order_of_keys(value: object) -> None:
    text = canonical_json(value)
    assert json.loads(text) == value
    if isinstance(value, dict):
        assert canonical_json(dict(reversed(value.items()))) == text


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, {"a": [math.nan]}, {1, 2}, b"bytes", Path("x"), {(1, 2): 3}],
    ids=str,
)
def test_what_json_does_not_have_is_refused(value: object) -> None:
    with pytest.raises(ArtifactError, match="only finite numbers, strings, lists and mappings"):
        canonical_json(value)


def test_json_files_round_trip_and_leave_nothing_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.json"
    write_json(path, {"b": 1, "a": "ü"})
    assert path.read_bytes() == '{"a":"ü","b":1}\n'.encode()
    assert read_json(path) == {"a": "ü", "b": 1}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"{", b'{"a":1}}', b"\xff\xfe", b"text"])
def test_a_file_that_is_not_json_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"x\.json must be readable JSON"):
        read_json(path)


def test_a_file_that_cannot_be_written_is_named_with_its_size(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ArtifactError, match=r"file/x\.json \(3 bytes\) must be writable; got Not a directory"
    ):
        write_json(tmp_path / "file" / "x.json", {})


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


def _grow(path: Path) -> None:
    (path / "a.txt").write_text("alpha and more")


def _swap(path: Path) -> None:
    (path / "a.txt").write_text("alphA")


def _add(path: Path) -> None:
    (path / "deep" / "extra").write_text("")


def _remove(path: Path) -> None:
    (path / "deep" / "b.bin").unlink()


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
        (_grow, r"a\.txt must have 5 bytes; got 14\. The file is torn or altered"),
        (_swap, r"a\.txt must have the SHA-256 in its manifest"),
        (_add, r"exactly the files its manifest lists; got \['deep/extra'\]"),
        (_remove, r"exactly the files its manifest lists; got \['deep/b\.bin'\]"),
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
            "must be as it was written",
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


def everything(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*"))


def test_a_published_directory_is_whole_and_alone(tmp_path: Path) -> None:
    publish_directory(tmp_path / "new" / "x", lambda out: (out / "f").write_text("1"))
    assert everything(tmp_path) == ["new", "new/x", "new/x/f"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
def test_a_failing_build_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def build(out: Path) -> None:
        (out / "half").write_text("1")
        assert not (tmp_path / "x").exists()
        raise error

    with pytest.raises(error):
        publish_directory(tmp_path / "x", build)
    assert everything(tmp_path) == []


def test_an_existing_target_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    built: list[Path] = []
    with pytest.raises(ArtifactError, match=r"output directory must not exist; got .*x"):
        publish_directory(tmp_path / "x", built.append)
    assert built == []
    assert everything(tmp_path) == ["x"]


def test_a_parent_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="file/x must be writable"):
        publish_directory(tmp_path / "file" / "x", lambda out: None)


@pytest.mark.parametrize("name", ["README.md", "LICENSE", ".gitattributes", ".DS_Store"])
def test_a_page_beside_an_artifact_changes_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "data").write_text("x")
    write_manifest(tmp_path, kind="k", schema=1, body={})
    before = read_manifest(tmp_path, kind="k", schema=1)
    (tmp_path / name).write_text("about")
    assert read_manifest(tmp_path, kind="k", schema=1) == before
    (tmp_path / "more").write_text("y")
    with pytest.raises(ArtifactError, match=r"exactly the files .*\['more'\]"):
        read_manifest(tmp_path, kind="k", schema=1)


def test_a_page_that_belongs_to_an_artifact_is_checked(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("x")
    write_manifest(tmp_path, kind="k", schema=1, body={})
    (tmp_path / "README.md").write_text("y")
    with pytest.raises(ArtifactError, match="must have the SHA-256"):
        read_manifest(tmp_path, kind="k", schema=1)
