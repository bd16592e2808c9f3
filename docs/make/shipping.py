"""Shipping of a trained checkpoint: into the package, with its results, their page and its card.

python -m docs.make.shipping CHECKPOINT --recipe smollm2 --name umim-smollm2-135m

CHECKPOINT is the directory that a finished run printed. Its measurements and its corpus are found
by the digests that each stage records of what it was given. What ships is stored smaller: the
module in bfloat16 (``--weights float32`` keeps it), the rules without the matcher's tables,
which are built in memory. What the rounding changes is measured and stands in the results.
``--priced DIR``, made of it by ``umim prune --keep-all``, adds prices and the bound of decoding.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from docs.make import shipped_model
from docs.make.document import RESULTS, ROOT
from docs.make.results import documents_of
from docs.make.shipping_trail import trail
from tasks.run.recipes import find_recipe
from tasks.run.stage import Artifact
from tasks.stages.corpus import parts
from tasks.stages.evaluate import rows_of
from tasks.stages.mixture import RECORD
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.checkpoint_files import (
    CHECKPOINT_SCHEMA,
    CheckpointConfig,
    read_config,
    resolve_checkpoint,
)
from umim_core.config.recipe import DEFAULT_TASK, Recipe
from umim_core.errors import ConfigError
from umim_core.evaluation.alignment import evaluate_alignment
from umim_core.model.umim import UMIM
from umim_core.rules.rule_prices import read_prices, write_prices
from umim_core.rules.rules_table import read_table, write_table
from umim_core.rules.ruleset import RULES_SCHEMA, RuleSet
from umim_core.store.artifacts import read_json, read_manifest, sha256_file, write_manifest
from umim_core.store.publication import publish_directory

ASSETS: Final = ROOT / "umim_core" / "embedded" / "assets"
SUMS: Final = ROOT / "tests" / "embedded" / "assets.sha256"
DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MAX_RULES_BYTES: Final = 4 << 20
_ROUNDING_ROWS: Final = 8
_LEVEL: Final = 19  # of zstd: a fifth smaller than a run's own table
_TABLE: Final = "rules.parquet"
_WRITTEN_ANEW: Final = ("kind", "schema", "digest", "files", "seal")


def store(
    checkpoint: Path, out: Path, weights: str = "bfloat16", priced: Path | None = None
) -> None:
    """Write a checkpoint in the form that ships; what lies at ``out`` is replaced.

    Args:
        checkpoint: Its directory.
        out: Where it goes.
        weights: Data type of the stored module; in memory it is float32.
        priced: The same with measured rules: its prices and its bound of decoding ship.

    Raises:
        ConfigError: If the priced checkpoint has other rules, another module or other settings.
    """
    if priced is not None:
        _check_priced(checkpoint, priced)
    settings = priced or checkpoint

    def write(directory: Path) -> None:
        module = load_file(checkpoint / "model.safetensors")
        cast = {
            name: value.to(DTYPES[weights]) if value.is_floating_point() else value  # or ids
            for name, value in module.items()
        }
        save_file(cast, directory / "model.safetensors")
        (directory / "model.safetensors").chmod(0o644)
        shutil.copyfile(settings / "config.json", directory / "config.json")
        rules = directory / "rules"
        rules.mkdir()
        described = read_manifest(checkpoint / "rules", kind="rules", schema=RULES_SCHEMA)
        write_table(rules / _TABLE, *read_table(checkpoint / "rules" / _TABLE), _LEVEL)
        if (prices := read_prices(settings / "rules")) is not None:
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
            "rules": found.rules.digest,
            "module": found.module.digest(),
            "settings": found.config.model_dump(exclude={"decode_max_damage"}),
        }
        for found in map(Checkpoint.load, (checkpoint, priced))
    )
    if odd := [part for part in own if own[part] != measured[part]]:
        raise ConfigError(
            "--priced must be what umim prune --keep-all made of the checkpoint that ships",
            f"other {odd[0]}",
            f"Measure it: umim prune {checkpoint} TEXTS --keep-all.",
        )


def results_of(
    checkpoint: Path, shipped: Path, recipe: Recipe, commit: str | None
) -> dict[str, Any]:
    """Return everything that the page and the card show; no paths of this machine.

    Args:
        checkpoint: The run's checkpoint.
        shipped: The same as it ships.
        recipe: What was run.
        commit: Of the source tree that trained it.
    """
    found, config = trail(checkpoint, recipe), read_config(checkpoint)
    facts, metrics = found.distilled.manifest()["facts"], found.evaluated.metrics
    names = ["", *(f"_part_{name}" for name in parts(found.tokenized))]
    rules = RuleSet.load(shipped / "rules")
    batch, length = recipe.distill.batch_size, recipe.segment_length
    return {
        "benchmark": shipped_model.NAME,
        "checkpoint": shipped.parent.name,
        "recipe": recipe.name,
        "facts": {
            "platform": facts["platform"],
            "commit": commit,
            "versions": {"python": facts["python"], **facts["versions"]},
        },
        "backbone": config.backbone,
        "training": {
            **{name: config.training[name] for name in ("steps", "best_step", "seed")},
            "batch_size": batch,
            "segment_length": length,
            "learning_rate": recipe.distill.learning_rate,
            "products": "bfloat16" if recipe.distill.bf16 else "float32",
            "tokens": int(config.training["steps"] or 0) * batch * length,
        },
        "module": _module(shipped, config),
        "rules": {
            "orders": {str(n): count for n, count in rules.counts_by_order.items()},
            "origin": rules.origin.described(),
            "bytes": (shipped / "rules" / _TABLE).stat().st_size,
        },
        "corpus": _corpus(found.corpus),
        "corpus_tokens": {
            split: found.tokenized.metrics[f"tokens_{split}"] for split in ("train", "valid")
        },
        "protocol": recipe.evaluate.model_dump(),
        "texts": {shipped_model.label(s): shipped_model.figures(metrics, s) for s in names},
        "task_name": _task_name(found.scores),
        "task": {side: score.metrics for side, score in found.scores.items()},
        "rounding": _rounding(found.tokenized, recipe, {"run": checkpoint, "shipped": shipped}),
    }


def _task_name(scores: Mapping[str, Artifact]) -> str | None:
    """Return the task that was scored, as the stage recorded it."""
    if not scores:
        return None
    return str(scores["umim"].manifest()["config"].get("task", DEFAULT_TASK))


def _module(shipped: Path, config: CheckpointConfig) -> dict[str, object]:
    stored = load_file(shipped / "model.safetensors").values()
    weights = [value for value in stored if value.is_floating_point()]  # the rest are ids
    (dtype,) = {str(value.dtype).removeprefix("torch.") for value in weights}
    return {
        "form": config.form(),
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "parameters": sum(value.numel() for value in weights),
        "stored": dtype,
        "bytes": (shipped / "model.safetensors").stat().st_size,
    }


def _corpus(corpus: Artifact) -> dict[str, Any]:
    """Return the parts with licence, sizes and digests, files by their base names."""
    record: Any = read_json(corpus.path / RECORD)
    for part in record.values():
        part["files"] = {
            split: {PurePosixPath(name).name: digest for name, digest in files.items()}
            if isinstance(files, dict)
            else files
            for split, files in part["files"].items()
        }
    return dict(record)


def _rounding(
    tokenized: Artifact, recipe: Recipe, checkpoints: Mapping[str, Path]
) -> dict[str, object]:
    """Measure the run's checkpoint and the shipped one on the same few rows."""
    rows = rows_of(
        tokenized, "test", recipe.segment_length, _ROUNDING_ROWS, recipe.evaluate.segments
    )
    found: dict[str, object] = {"rows": len(rows)}
    for name, path in checkpoints.items():
        compressed = UMIM.from_pretrained(path).compressed
        means = evaluate_alignment(rows, compressed, recipe.evaluate.batch_size).means
        found[name] = {metric: means[metric] for metric in ("kl", "top1")}
    return found


def ship(
    checkpoint: Path,
    shipped: Path,
    recipe: Recipe,
    weights: str = "bfloat16",
    commit: str | None = None,
    priced: Path | None = None,
) -> dict[str, Any]:
    """Store and measure a checkpoint; only then is what ships replaced.

    Args:
        checkpoint: The run's checkpoint.
        shipped: Where it goes.
        recipe: What was run.
        weights: Data type of the stored module.
        commit: Of the source tree that trained it.
        priced: As in ``store``.

    Returns:
        Its results.

    Raises:
        ConfigError: If its rules are too large, or it was not run as the recipe says.
    """
    with TemporaryDirectory() as folder:
        made = Path(folder) / shipped.parent.name / shipped.name
        store(checkpoint, made, weights, priced)
        size = (made / "rules" / _TABLE).stat().st_size
        if size > MAX_RULES_BYTES:
            raise ConfigError(
                f"shipped rules must take at most {MAX_RULES_BYTES} bytes",
                size,
                "Raise tau, or set rule_budget.",
            )
        results = results_of(checkpoint, made, recipe, commit)
        shutil.rmtree(shipped, ignore_errors=True)
        publish_directory(shipped, partial(shutil.copytree, made, dirs_exist_ok=True))
    return results


def write_sums(assets: Path = ASSETS, sums: Path = SUMS) -> None:
    """Write the digests of all shipped files, as ``sha256sum`` prints them."""
    names = sorted(
        path.relative_to(assets).as_posix() for path in assets.rglob("*") if path.is_file()
    )
    lines = [f"{sha256_file(assets / name)}  {name}\n" for name in names]
    sums.write_text("".join(lines), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Ship a checkpoint."""
    parser = argparse.ArgumentParser(prog="docs.make.shipping", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="directory, as the run printed it")
    parser.add_argument("--recipe", default="smollm2", help="what was run")
    parser.add_argument("--name", default="umim-smollm2-135m", help="what it will be called")
    parser.add_argument("--weights", choices=DTYPES, default="bfloat16")
    parser.add_argument("--commit", help="of the tree that trained it")
    parser.add_argument("--priced", help="the same, as umim prune --keep-all wrote it")
    options = parser.parse_args(arguments)
    recipe = find_recipe(options.recipe)
    if not isinstance(recipe, Recipe):
        parser.error(f"{options.recipe} trains no checkpoint")
    checkpoint = resolve_checkpoint(options.checkpoint).resolve()
    shipped = ASSETS / options.name / "checkpoint"
    priced = None if options.priced is None else resolve_checkpoint(options.priced).resolve()
    results = ship(checkpoint, shipped, recipe, options.weights, options.commit, priced)
    file = RESULTS / f"{recipe.name}.json"
    file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for document in (*shipped_model.cards(), *documents_of(file)):
        document.write()
    write_sums()
    size = sum(path.stat().st_size for path in shipped.rglob("*") if path.is_file())
    print(f"{shipped.relative_to(ROOT)}: {size:,} bytes; {file.relative_to(ROOT)} and its page")


if __name__ == "__main__":
    main()
