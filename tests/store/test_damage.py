"""Damaged artifacts: flipped bytes and files that are not listed are an error, or no change.

Twice: as disks do it, and with a manifest that was written again and so vouches for the damage.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from support.damage_tables import table_of
from support.merged_models import fresh_model
from support.ngram_oracle import filtered
from umim_core.backbone.backbone import Backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import UmimError
from umim_core.mining.counting import count_ngrams
from umim_core.rules.damage_table import DamageTable
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import MANIFEST, read_json, read_manifest, write_manifest
from umim_core.training.token_rows import TokenRows

STREAM = np.random.default_rng(3).geometric(0.15, 4000) % 50


def rules_content(directory: Path) -> object:
    rules = RuleSet.load(directory)
    starts, lengths = Matcher(rules).segment(STREAM)
    return rules.digest, rules.infix_free, starts.tobytes(), lengths.tobytes()


def checkpoint_content(directory: Path) -> object:
    found = Checkpoint.load(directory)
    weights = [value.numpy().tobytes() for value in found.module.state_dict().values()]
    return repr(found.config), found.rules.digest, weights


def rows_content(directory: Path) -> object:
    read_manifest(directory, kind="stage", schema=1)
    rows = TokenRows.load(directory, 0)
    return [np.array(array).tobytes() for array in (rows.ids, rows.offsets, rows.parts)]


def damage_content(directory: Path) -> object:
    return DamageTable.load(directory).mean_kl().tobytes()


# Reads all of an artifact, and the files that are damaged in turn.
KINDS = {
    "rules": (rules_content, ("rules.parquet", MANIFEST)),
    "checkpoint": (checkpoint_content, ("model.safetensors", "config.json", MANIFEST)),
    "damage": (damage_content, ()),
    "rows": (rows_content, ("ids.npy", "offsets.npy")),
}


@pytest.fixture(scope="module")
def good(tiny_llama: Backbone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whole artifact of each kind."""
    root = tmp_path_factory.mktemp("good")
    counts = count_ngrams(STREAM, np.array([0, len(STREAM)], dtype=np.int64), 30)
    rules = filtered(counts, containment="keep", segment_length=len(STREAM))
    rules.with_prices(np.ones(len(rules), np.float32)).save(root / "rules")
    Checkpoint.of(fresh_model(tiny_llama, rules, seed=5), {"steps": 3}).save(root / "checkpoint")
    table_of([8, 0, 4, 1], [8, 0, 4, 1], [1.0, 0.0, 2.0, 0.5]).save(root / "damage")
    TokenRows.of_rows([STREAM[:700].tolist(), [7, 8, 9]], [700, 2]).save(root / "rows")
    write_manifest(root / "rows", kind="stage", schema=1, body={})
    return root


@pytest.mark.parametrize("flips", [60, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("kind", "file", "forged"),
    [
        (kind, file, forged)
        for kind, (_, files) in KINDS.items()
        for file in files
        for forged in (False, True)
        if not (forged and file == MANIFEST)
    ],
)
def test_a_flipped_byte_is_an_error_or_changes_nothing(
    kind: str, file: str, forged: bool, flips: int, good: Path, tmp_path: Path
) -> None:
    """Where a forged manifest vouches for the byte, it raises nothing but named errors."""
    rng = np.random.default_rng(int.from_bytes(f"{kind}/{file}".encode(), "little") % 1000)
    shutil.copytree(good / kind, tmp_path / "bad")
    content, data = KINDS[kind][0], (good / kind / file).read_bytes()
    want, errors = content(good / kind), 0
    for _ in range(flips):
        position, mask = int(rng.integers(len(data))), int(rng.integers(1, 256))
        changed = bytearray(data)
        changed[position] ^= mask  # one to eight bits
        (tmp_path / "bad" / file).write_bytes(changed)
        if forged:
            sign(tmp_path / "bad", file)
        try:
            found = content(tmp_path / "bad")
        except UmimError:
            errors += 1
        else:
            assert forged or found == want, (position, mask)
    # The faults fired: only a manifest's key "seal" may be misspelt.
    assert errors > (0 if forged else 0.9 * flips)


def sign(directory: Path, file: str) -> None:
    """Write the manifest above a file again, and all manifests above that one."""
    for folder in [directory / parent for parent in Path(file).parents]:
        if (folder / MANIFEST).exists():
            body = dict(read_json(folder / MANIFEST))
            kind, schema = str(body.pop("kind")), int(str(body.pop("schema")))
            for name in ("files", "digest", "seal"):
                del body[name]
            write_manifest(folder, kind=kind, schema=schema, body=body)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("rules", "rules.parquet"), ("checkpoint", "model.safetensors"), ("damage", "kl.npy")],
)
def test_a_manifest_must_list_what_is_read(
    good: Path, tmp_path: Path, kind: str, name: str
) -> None:
    bad = shutil.copytree(good / kind, tmp_path / "bad")
    (bad / name).unlink()
    sign(bad, name)
    with pytest.raises(UmimError, match=rf"exactly the files its manifest lists; got .*{name}"):
        KINDS[kind][0](bad)
