"""Files next to an artifact's own that are no part of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from umim_core.errors import ArtifactError
from umim_core.store.artifacts import read_manifest, write_manifest


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
