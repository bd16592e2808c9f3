"""Pipes, devices and links where an artifact's files are read by name: refused, not waited for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from tests.support.damage_tables import table_of
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.embedded.assets import embedded_path
from umim_core.errors import UmimError
from umim_core.rules.damage_table import DamageTable
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import MANIFEST, read_json, write_manifest

LOADERS: Final = {"rules": RuleSet.load, "checkpoint": Checkpoint.load, "damage": DamageTable.load}
FILES: Final = {
    "rules": ("manifest.json", "rules.parquet", "matcher/tables.npy", "prices.npy"),
    "checkpoint": ("manifest.json", "config.json", "model.safetensors", "rules/manifest.json"),
    "damage": ("manifest.json", "kl.npy", "rules/rules.parquet"),
}


@pytest.fixture
def artifact(kind: str, tmp_path: Path) -> Path:
    place = tmp_path / kind
    if kind == "checkpoint":
        embedded = embedded_path("umim-docs-gpt2", "checkpoint")
        assert embedded is not None
        shutil.copytree(embedded, place)
    elif kind == "damage":
        table_of([8, 0, 4, 1], [8, 0, 4, 1], [1.0, 0.0, 2.0, 0.5]).save(place)
    else:
        rules = RuleSet.from_spans([(1, 2), (1, 2, 3)])
        prices = np.array([0.5, 1.0], np.float32)
        RuleSet(rules.ids_by_order, rules.support_by_order, rules.origin, prices).save(place)
    return place


def put(path: Path, special: str) -> None:
    """Put what is no file into a file's place."""
    path.unlink()
    if special == "pipe":
        os.mkfifo(path)
    elif special == "link to a pipe":
        pipe = path.with_name("pipe")
        os.mkfifo(pipe)
        path.symlink_to(pipe)
    elif special == "device":
        path.symlink_to("/dev/zero")
    else:
        path.symlink_to(path.with_name("nothing"))


def sign(directory: Path) -> None:
    """Write a manifest of the regular files alone."""
    body = dict(read_json(directory / MANIFEST))
    kind, schema = str(body["kind"]), int(str(body["schema"]))
    for name in ("files", "digest", "seal", "kind", "schema"):
        body.pop(name)
    write_manifest(directory, kind=kind, schema=schema, body=body)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("special", ["pipe", "link to a pipe", "device", "dangling link"])
@pytest.mark.parametrize(
    ("kind", "name"), [(k, name) for k, names in FILES.items() for name in names]
)
def test_what_is_no_file_is_refused(artifact: Path, kind: str, name: str, special: str) -> None:
    put(artifact / name, special)
    for forged in (False, True) if name != "manifest.json" and "rules/" not in name else (False,):
        if forged:
            sign(artifact)
        with pytest.raises(UmimError):
            LOADERS[kind](artifact)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("rules", "rules.parquet"), ("checkpoint", "model.safetensors"), ("damage", "kl.npy")],
)
def test_a_manifest_must_list_what_is_read(artifact: Path, kind: str, name: str) -> None:
    (artifact / name).unlink()
    sign(artifact)
    with pytest.raises(UmimError, match=rf"exactly the files its manifest lists; got .*{name}"):
        LOADERS[kind](artifact)


@pytest.mark.parametrize("kind", ["rules"])
def test_tables_behind_a_link_to_a_folder_are_not_read(artifact: Path, kind: str) -> None:
    outside = artifact.with_name("outside")
    (artifact / "matcher").rename(outside)
    (outside / "tables.npy").unlink()
    os.mkfifo(outside / "tables.npy")
    (artifact / "matcher").symlink_to(outside)
    sign(artifact)
    assert len(LOADERS[kind](artifact)) == 2
