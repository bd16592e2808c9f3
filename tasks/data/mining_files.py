"""Files of the mining stages: finished parts, arrays per order, digest of the corpus, rules."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from umim_core.errors import ArtifactError
from umim_core.rules.inspection import collision_rate
from umim_core.rules.ruleset import RuleSet
from umim_core.store.arrays import open_array, save_array
from umim_core.store.artifacts import read_json, read_manifest, write_json, write_manifest
from umim_core.store.publication import STATE, publish_directory

_SCHEMA: Final = 1
_CORPUS: Final = "corpus.json"
ByOrder = Mapping[int, np.ndarray]


def clear_leftovers(out: Path) -> None:
    """Remove what a run that died left behind, but for the finished parts under ``state``."""
    for path in out.iterdir():
        if path.is_dir() and path.name != STATE:
            shutil.rmtree(path)
        elif path.name != STATE:
            path.unlink()


def save_part(
    folder: Path, kind: str, body: dict[str, object], write: Callable[[Path], None]
) -> None:
    """Publish a finished part of a stage."""

    def fill(partial: Path) -> None:
        write(partial)
        write_manifest(partial, kind=kind, schema=_SCHEMA, body=body)

    publish_directory(folder, fill)


def has_part(folder: Path, kind: str, body: dict[str, object], logger: logging.Logger) -> bool:
    """Return whether a part is finished; one that is torn, or another part, is removed."""
    if not folder.is_dir():
        return False
    stage, part = logger.name.rpartition(".")[2], folder.name.replace("-", " ")
    try:
        manifest = read_manifest(folder, kind=kind, schema=_SCHEMA)
        recorded = {name: manifest.get(name) for name in body}
        if recorded != body:
            raise ArtifactError(f"{part} must hold {body}", recorded, "It is counted again.")
    except ArtifactError as error:
        logger.warning("%s: %s is counted again: %s", stage, part, error)
        shutil.rmtree(folder)
        return False
    logger.info("%s: %s was finished by an earlier run", stage, part)
    return True


def save_orders(folder: Path, **arrays: ByOrder) -> None:
    """Write one array per order and name, e.g. ``keys_2.npy``."""
    for name, by_order in arrays.items():
        for order, array in by_order.items():
            save_array(folder / f"{name}_{order}.npy", array)


def load_orders(folder: Path, name: str) -> dict[int, np.ndarray]:
    """Read the arrays of one name."""
    orders = sorted(int(path.stem.rpartition("_")[2]) for path in folder.glob(f"{name}_*.npy"))
    return {order: np.array(open_array(folder / f"{name}_{order}.npy")) for order in orders}


def write_corpus_digest(folder: Path, digest: str) -> None:
    """Record which tokens were read."""
    write_json(folder / _CORPUS, {"digest": digest})


def corpus_digest(folder: Path) -> str:
    """Return the digest of the tokens that counts were made from."""
    raw = read_json(folder / _CORPUS)
    if not isinstance(raw, dict) or not isinstance(raw.get("digest"), str):
        raise ArtifactError(
            f"{folder / _CORPUS} must hold the corpus digest",
            raw,
            "Remove the artifact; it will be built again.",
        )
    return str(raw["digest"])


def write_rules(out: Path, rules: RuleSet, **steps: Mapping[int, int]) -> dict[str, float]:
    """Write the folder ``rules`` of an artifact and return its metrics."""
    (out / "rules").mkdir()
    rules.write(out / "rules")
    sizes = rules.counts_by_order
    shown = {"raw": sizes, "overlap": sizes, "rules": sizes} | steps
    numbers = {f"{name}_{n}": float(shown[name][n]) for name in shown for n in rules.orders}
    tau = {} if rules.options.source == "explicit" else {"tau": float(rules.options.tau)}
    return {**numbers, **tau, "collision_rate": collision_rate(rules)}
