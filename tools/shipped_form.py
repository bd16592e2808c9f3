"""Shipped form of a checkpoint: the module in bfloat16, the rules without the matcher's tables."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file

from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.checkpoint_files import CHECKPOINT_SCHEMA, read_config
from umim_core.config.form import check_merge, check_raw_tail
from umim_core.errors import ConfigError
from umim_core.rules.rules_table import read_table, write_table
from umim_core.rules.ruleset import RULES_SCHEMA, read_prices, write_prices
from umim_core.store.artifacts import read_manifest, write_json, write_manifest
from umim_core.store.publication import publish_directory

DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TABLE: Final = "rules.parquet"
_LEVEL: Final = 19  # of zstd: a fifth smaller than a run's own table
_WRITTEN_ANEW: Final = ("kind", "schema", "digest", "files", "seal")


def store(
    checkpoint: Path,
    out: Path,
    weights: str = "bfloat16",
    priced: Path | None = None,
    defaults: Mapping[str, object] | None = None,
) -> None:
    """Write a checkpoint in the form that ships; what lies at ``out`` is replaced.

    Args:
        checkpoint: Its directory.
        out: Where it goes.
        weights: Data type of the stored module; in memory it is float32.
        priced: The same with measured rules: its prices and its bound of decoding ship.
        defaults: Fields of its configuration in place of its own: what it recommends to its users
            (``merge``, ``raw_tail``), notes on its training.

    Raises:
        ConfigError: If the priced checkpoint has other rules, another module or other settings, or
            if ``merge`` is unknown, or ``raw_tail`` is negative or has no effect.
    """
    measured = priced or checkpoint
    config = read_config(measured).model_copy(update=dict(defaults or {}))
    check_merge(config.merge)
    check_raw_tail(config.raw_tail, config.merge)
    if priced is not None:
        _check_priced(checkpoint, priced)
    content = config.model_dump(mode="json")

    def write(directory: Path) -> None:
        module = load_file(checkpoint / "model.safetensors")
        cast = {
            name: value.to(DTYPES[weights]) if value.is_floating_point() else value
            for name, value in module.items()
        }
        save_file(cast, directory / "model.safetensors")
        (directory / "model.safetensors").chmod(0o644)
        write_json(directory / "config.json", content)
        rules = directory / "rules"
        rules.mkdir()
        described = read_manifest(measured / "rules", kind="rules", schema=RULES_SCHEMA)
        write_table(rules / TABLE, *read_table(checkpoint / "rules" / TABLE), _LEVEL)
        if (prices := read_prices(measured / "rules")) is not None:
            write_prices(rules, prices)
        body = {name: value for name, value in described.items() if name not in _WRITTEN_ANEW}
        write_manifest(rules, kind="rules", schema=RULES_SCHEMA, body=body)
        write_manifest(directory, kind="checkpoint", schema=CHECKPOINT_SCHEMA, body={})

    read_manifest(checkpoint, kind="checkpoint", schema=CHECKPOINT_SCHEMA)
    shutil.rmtree(out, ignore_errors=True)
    publish_directory(out, write)


def _check_priced(checkpoint: Path, priced: Path) -> None:
    """Refuse prices of another checkpoint."""
    own, measured = (
        {
            "rules": loaded.rules.digest,
            "module": loaded.module.digest(),
            "settings": loaded.config.model_dump(exclude={"decode_max_damage"}),
        }
        for loaded in map(Checkpoint.load, (checkpoint, priced))
    )
    if odd := [part for part in own if own[part] != measured[part]]:
        raise ConfigError(
            "--priced must be what umim prune --keep-all made of the checkpoint that ships",
            f"other {odd[0]}",
            f"Measure it: umim prune {checkpoint} TEXTS --keep-all.",
        )
