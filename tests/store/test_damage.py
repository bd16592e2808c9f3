"""Damaged artifacts: flipped bytes and special files are an error with a name, or no change.

Twice: as disks do it, and with a manifest that was written again and so vouches for the damage.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from support.damage_tables import table_of
from support.merged_models import fresh_model
from support.ngram_oracle import filtered
from umim_core.backbone.backbone import Backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.embedded.assets import embedded_path
from umim_core.errors import UmimError
from umim_core.mining.counting import count_ngrams
from umim_core.rules.damage_table import DamageTable
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import MANIFEST, read_json, read_manifest, write_manifest
from umim_core.training.token_rows import TokenRows

STREAM = np.random.default_rng(3).geometric(0.15, 4000) % 50
QUICK, FULL = 60, 1000


@dataclass(frozen=True)
class Kind:
    """A kind of artifact: how to make one, what its content is, what its manifest says it is."""

    name: str
    make: Callable[[Path, Backbone], None]
    content: Callable[[Path], str]  # reads all of it; raises what the readers raise


def sha(*parts: bytes | str) -> str:
    lines = (part if isinstance(part, bytes) else part.encode() for part in parts)
    return hashlib.sha256(b"\0".join(lines)).hexdigest()


def mined() -> RuleSet:
    counts = count_ngrams(STREAM, np.array([0, len(STREAM)], dtype=np.int64), 30)
    return filtered(counts, containment="keep", segment_length=len(STREAM))


def rules_content(directory: Path) -> str:
    rules = RuleSet.load(directory)
    starts, lengths = Matcher(rules).segment(STREAM)
    return sha(rules.digest, str(rules.infix_free), starts.tobytes(), lengths.tobytes())


def make_checkpoint(directory: Path, backbone: Backbone) -> None:
    Checkpoint.of(fresh_model(backbone, mined(), seed=5), {"steps": 3}).save(directory)


def checkpoint_content(directory: Path) -> str:
    found = Checkpoint.load(directory)
    weights = (value.numpy().tobytes() for value in found.module.state_dict().values())
    return sha(repr(found.config), found.rules.digest, *weights)


def make_rows(directory: Path, _: Backbone) -> None:
    TokenRows.of_rows([STREAM[:700].tolist(), [7, 8, 9]], [700, 2]).save(directory)
    write_manifest(directory, kind="stage", schema=1, body={})


def rows_content(directory: Path) -> str:
    read_manifest(directory, kind="stage", schema=1)
    rows = TokenRows.load(directory, 0)
    return sha(*(np.array(array).tobytes() for array in (rows.ids, rows.offsets, rows.parts)))


KINDS = {
    "rules": Kind("rules", lambda path, _: mined().save(path), rules_content),
    "checkpoint": Kind("checkpoint", make_checkpoint, checkpoint_content),
    "rows": Kind("stage", make_rows, rows_content),
}
FILES = [
    ("rules", "rules.parquet"),
    ("rules", "manifest.json"),
    ("checkpoint", "model.safetensors"),
    ("checkpoint", "config.json"),
    ("checkpoint", "manifest.json"),
    ("rows", "ids.npy"),
    ("rows", "offsets.npy"),
]


@pytest.fixture(scope="module")
def good(tiny_llama: Backbone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whole artifact of each kind."""
    root = tmp_path_factory.mktemp("good")
    for name, kind in KINDS.items():
        kind.make(root / name, tiny_llama)
    return root


@pytest.fixture(params=[QUICK, pytest.param(FULL, marks=pytest.mark.full)])
def flips(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def torn(data: bytes, rng: np.random.Generator) -> tuple[bytes, int, int]:
    """Flip one to eight bits of one byte; return also its position and the mask."""
    position, mask = int(rng.integers(len(data))), int(rng.integers(1, 256))
    changed = bytearray(data)
    changed[position] ^= mask
    return bytes(changed), position, mask


@pytest.mark.parametrize(("kind", "file"), FILES)
def test_a_flipped_byte_is_an_error_or_changes_nothing(
    kind: str, file: str, flips: int, good: Path, tmp_path: Path
) -> None:
    seed = int.from_bytes(f"{kind}/{file}".encode(), "little") % 1000
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    shutil.copytree(good / kind, tmp_path / "bad")
    want = KINDS[kind].content(good / kind)
    data = (good / kind / file).read_bytes()
    errors = 0
    for _ in range(flips):
        changed, position, mask = torn(data, rng)
        (tmp_path / "bad" / file).write_bytes(changed)
        try:
            assert KINDS[kind].content(tmp_path / "bad") == want, (position, mask)
        except UmimError:
            errors += 1
    assert errors > 0.9 * flips  # the faults fired: only a manifest's key "seal" may be misspelt


@pytest.mark.parametrize(("kind", "file"), [pair for pair in FILES if "manifest" not in pair[1]])
def test_damage_that_the_manifest_vouches_for_raises_nothing_but_named_errors(
    kind: str, file: str, flips: int, good: Path, tmp_path: Path
) -> None:
    seed = int.from_bytes(f"{file}/{kind}".encode(), "little") % 1000
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    shutil.copytree(good / kind, tmp_path / "bad")
    data = (good / kind / file).read_bytes()
    errors = 0
    for _ in range(flips):
        (tmp_path / "bad" / file).write_bytes(torn(data, rng)[0])
        sign(tmp_path / "bad", file)
        try:
            KINDS[kind].content(tmp_path / "bad")
        except UmimError:
            errors += 1
    assert errors > 0


def sign(directory: Path, file: str) -> None:
    """Write the manifest above a file again, and all manifests above that one."""
    for folder in [directory / parent for parent in Path(file).parents]:
        if (folder / MANIFEST).exists():
            body = dict(read_json(folder / MANIFEST))
            kind, schema = str(body.pop("kind")), int(str(body.pop("schema")))
            for name in ("files", "digest", "seal"):
                del body[name]
            write_manifest(folder, kind=kind, schema=schema, body=body)


# Special files

LOADERS: Final = {"rules": RuleSet.load, "checkpoint": Checkpoint.load, "damage": DamageTable.load}
READ: Final = {
    "rules": ("manifest.json", "rules.parquet", "prices.npy"),
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
    if "pipe" in special:
        os.mkfifo(path if special == "pipe" else path.with_name("pipe"))
    if special != "pipe":
        targets = {"link to a pipe": "pipe", "device": "/dev/zero", "dangling link": "nothing"}
        path.symlink_to(targets[special])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("special", ["pipe", "link to a pipe", "device", "dangling link"])
@pytest.mark.parametrize(
    ("kind", "name"), [(k, name) for k, names in READ.items() for name in names]
)
def test_what_is_no_file_is_refused(artifact: Path, kind: str, name: str, special: str) -> None:
    put(artifact / name, special)
    for forged in (False, True) if not name.endswith(MANIFEST) else (False,):
        if forged:
            sign(artifact, name)
        with pytest.raises(UmimError):
            LOADERS[kind](artifact)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("rules", "rules.parquet"), ("checkpoint", "model.safetensors"), ("damage", "kl.npy")],
)
def test_a_manifest_must_list_what_is_read(artifact: Path, kind: str, name: str) -> None:
    (artifact / name).unlink()
    sign(artifact, name)
    with pytest.raises(UmimError, match=rf"exactly the files its manifest lists; got .*{name}"):
        LOADERS[kind](artifact)
