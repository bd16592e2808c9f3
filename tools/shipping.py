"""Shipping of a trained checkpoint: into the package, with its results, their page and its card.

python -m tools.shipping CHECKPOINT --recipe smollm2 --name umim-smollm2-135m

CHECKPOINT is the directory that a finished run printed. Its measurements and its corpus are found
as the recipe's flow asks for them, with the code that ran it. What ships is stored smaller: the
module in bfloat16, the rules compressed harder. What the rounding changes is measured and stands in
the results.
``--priced DIR``, made of it by ``umim prune --keep-all``, adds prices and the bound of decoding;
``--merge`` and ``--raw-tail`` are what it recommends to its users.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from safetensors.torch import load_file

from docs.make.document import RESULTS, ROOT
from docs.make.results import documents_of, part_label
from flows import parts
from flows.planner import Planner
from tasks.cluster.lease import ClusterLease
from tasks.report.comparison import Result
from tasks.run.pipeline import site_of
from tasks.run.recipes import find_recipe
from tasks.run.stage import STAGE_SCHEMA, Artifact, StageCall
from tasks.stages.corpus import PART, RECORD, splits_with
from tasks.stages.evaluate import rows_of
from umim_core.adaptation.settings import BASE, WT
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.checkpoint_files import (
    CHECKPOINT_SCHEMA,
    CheckpointConfig,
    read_config,
    resolve_checkpoint,
)
from umim_core.checkpoint.module_weights import WEIGHTS, save_tensors
from umim_core.cli.console_output import telling
from umim_core.config.form import MERGES, check_merge, check_raw_tail
from umim_core.config.recipe import Recipe
from umim_core.errors import ConfigError, require
from umim_core.evaluation.alignment import evaluate_alignment
from umim_core.model.umim import UMIM
from umim_core.rules.ruleset import TABLE, RuleSet
from umim_core.store.artifacts import (
    payload_files,
    read_json,
    read_manifest,
    sha256_file,
    write_json,
    write_manifest,
)
from umim_core.store.publication import publish_directory

_LEVEL: Final = 19  # of zstd: a fifth smaller than a run's own table
ASSETS: Final = ROOT / "umim_core" / "embedded" / "assets"
SUMS: Final = ROOT / "tests" / "embedded" / "assets.sha256"
MAX_RULES_BYTES: Final = 4 << 20
_ROUNDING_ROWS: Final = 8
_REMEDY: Final = "Name the recipe that was run, as it was then, and run it with this code."


class FinishedRun(Planner[Recipe]):
    """Stands in for a pipeline run: it finds every stage below a root, and builds none."""

    def __init__(self, recipe: Recipe, root: Path) -> None:
        super().__init__(recipe)
        self.site = site_of(root, recipe, ClusterLease(recipe.cluster, root))

    def stage(self, call: StageCall, *, label: str = "", setting: str = "") -> Artifact:
        spec = call.spec(self.site)
        place = self.site.root / spec.name / spec.key
        rule = f"the recipe {self.recipe.name} must have been run to its end as it is now"
        found = f"no stage {spec.name} of {label or self.recipe.name}"
        require(place.is_dir(), ConfigError, rule, found, _REMEDY)
        record = read_manifest(place, kind="stage", schema=STAGE_SCHEMA, verify=False)
        return Artifact.of(place, record)


def found(checkpoint: Path, recipe: Recipe) -> tuple[Result, parts.Sources]:
    """Find what belongs to a checkpoint below its artifact root, as the recipe's flow calls it."""
    run: Any = FinishedRun(recipe, checkpoint.parents[2])
    sources, results = parts.train(run)
    parts.evaluate(run, sources, results)
    made = [result for result in results if result.settings[WT].path == checkpoint.parent]
    rule = f"a cell of the recipe {recipe.name} must have made the checkpoint"
    require(bool(made), ConfigError, rule, str(checkpoint), _REMEDY)
    return made[0], sources


def store(
    checkpoint: Path, out: Path, priced: Path | None = None, defaults: Mapping[str, object] = {}
) -> None:
    """Write a checkpoint in the form that ships.

    ``priced`` is the same with measured rules: its prices and its bound of decoding ship.
    ``defaults`` are fields of its configuration in place of its own: what it recommends to its
    users (``merge``, ``raw_tail``), notes on its training.
    """
    trained = Checkpoint.load(checkpoint)
    measured = trained if priced is None else Checkpoint.load(priced)
    _check_priced(trained, measured)
    config = measured.config.model_copy(update=dict(defaults))
    check_merge(config.merge)
    check_raw_tail(config.raw_tail, config.merge)

    def write(directory: Path) -> None:
        tensors = trained.module.state_dict()
        rounded = {name: x.bfloat16() for name, x in tensors.items() if x.is_floating_point()}
        save_tensors(tensors | rounded, directory / WEIGHTS)
        (directory / WEIGHTS).chmod(0o644)
        write_json(directory / "config.json", config.model_dump(mode="json"))
        measured.rules.write(directory / "rules", _LEVEL)
        write_manifest(directory, kind="checkpoint", schema=CHECKPOINT_SCHEMA, body={})

    publish_directory(out, write)


def _check_priced(trained: Checkpoint, measured: Checkpoint) -> None:
    """Refuse prices of another checkpoint."""
    own, priced = (
        {
            "rules": loaded.rules.digest,
            "module": loaded.module.digest(),
            "settings": loaded.config.model_dump(exclude={"decode_max_damage", "budget"}),
        }
        for loaded in (trained, measured)
    )
    odd = [f"other {part}" for part in own if own[part] != priced[part]]
    rule = "--priced must be what umim prune --keep-all made of the checkpoint that ships"
    remedy = "Measure it: umim prune CHECKPOINT TEXTS --keep-all."
    require(not odd, ConfigError, rule, ", ".join(odd), remedy)


def results_of(
    checkpoint: Path, recipe: Recipe, commit: str | None, shipped: Path
) -> dict[str, Any]:
    """Return everything that the page and the card show; no paths of this machine."""
    (cell, sources), config = found(checkpoint, recipe), read_config(checkpoint)
    tokenized, metrics = cell.tokenized, cell.evaluations[WT].metrics
    facts = cell.settings[WT].manifest()["facts"]
    names = ["", *(f"_{split}" for split in splits_with(tokenized, PART))]
    rules, ships = RuleSet.load(shipped / "rules"), read_config(shipped)
    batch, length = recipe.distill.batch_size, recipe.segment_length
    task = next(iter(sources.tasks), None)
    sides = {} if task is None else {"umim": WT, "base": BASE}
    return {
        "benchmark": "shipped_model",
        "checkpoint": shipped.parent.name,
        "recipe": recipe.name,
        "facts": {
            "platform": facts["platform"],
            "commit": commit,
            "versions": {"python": facts["python"], **facts["versions"]},
        },
        "backbone": config.backbone,
        "recommended": {"merge": ships.merge, "raw_tail": ships.raw_tail},
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
            "origin": rules.origin.record(),
            "bytes": (shipped / "rules" / TABLE).stat().st_size,
        },
        "corpus": read_json(sources.corpus.path / RECORD),
        "corpus_tokens": {
            split: tokenized.metrics[f"tokens_{split}"] for split in ("train", "valid")
        },
        "protocol": recipe.evaluate.model_dump(),
        "texts": {part_label(s): text_figures(metrics, s) for s in names},
        "task_name": task,
        "task": {side: cell.scores[str(task), setting].metrics for side, setting in sides.items()},
        "rounding": _rounding(tokenized, recipe, {"run": checkpoint, "shipped": shipped}),
    }


def text_figures(metrics: Mapping[str, float], suffix: str) -> dict[str, Any]:
    """Return the figures of one text, means with their standard errors, by their names' suffix."""
    means = ("top1", "top10", "mrr", "kl", "nats_increase")
    plain = ("token_reduction", "spans_per_row", "aligned_rows", "ppl_base", "ppl_umim")
    return {
        name: {"mean": metrics[name + suffix], "std": metrics.get(f"{name}_se{suffix}")}
        for name in means
    } | {name: metrics[name + suffix] for name in (*plain, "ppl_token_reduction")}


def _module(shipped: Path, config: CheckpointConfig) -> dict[str, object]:
    stored = load_file(shipped / WEIGHTS).values()
    weights = [value for value in stored if value.is_floating_point()]  # the rest are ids
    (dtype,) = {str(value.dtype).removeprefix("torch.") for value in weights}
    return {
        "form": config.form(),
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "parameters": sum(value.numel() for value in weights),
        "stored": dtype,
        "bytes": (shipped / WEIGHTS).stat().st_size,
    }


def _rounding(
    tokenized: Artifact, recipe: Recipe, checkpoints: Mapping[str, Path]
) -> dict[str, object]:
    """Measure the run's checkpoint and the shipped one on the same few rows."""
    rows = rows_of(
        tokenized, "test", recipe.segment_length, _ROUNDING_ROWS, recipe.evaluate.segments
    )
    figures: dict[str, object] = {"rows": len(rows)}
    for name, path in checkpoints.items():
        merged_model = UMIM.from_pretrained(path, dtype="float32").merged_model
        means = evaluate_alignment(rows, merged_model, recipe.evaluate.batch_size).means
        figures[name] = {metric: means[metric] for metric in ("kl", "top1")}
    return figures


def ship(
    checkpoint: Path,
    shipped: Path,
    measure: Callable[[Path], dict[str, Any]],
    priced: Path | None = None,
    defaults: Mapping[str, object] = {},
) -> dict[str, Any]:
    """Store a checkpoint (``store``) and measure what is stored; only then replace what ships."""
    with TemporaryDirectory() as folder:
        new_checkpoint = Path(folder) / shipped.parent.name / shipped.name
        store(checkpoint, new_checkpoint, priced, defaults)
        size = (new_checkpoint / "rules" / TABLE).stat().st_size
        rule = f"shipped rules must take at most {MAX_RULES_BYTES} bytes"
        require(size <= MAX_RULES_BYTES, ConfigError, rule, size, "Raise tau, or choose spans.")
        results = measure(new_checkpoint)
        shutil.rmtree(shipped, ignore_errors=True)
        publish_directory(shipped, partial(shutil.copytree, new_checkpoint, dirs_exist_ok=True))
    return results


def write_sums() -> None:
    """Write the digests of all shipped files, as ``sha256sum`` prints them."""
    files = sorted(payload_files(ASSETS).items())
    lines = [f"{sha256_file(path)}  {name}\n" for name, path in files]
    SUMS.write_text("".join(lines), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="tools.shipping", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="directory, as the run printed it")
    parser.add_argument("--recipe", default="smollm2", help="what was run")
    parser.add_argument("--name", default="umim-smollm2-135m", help="what it will be called")
    parser.add_argument("--commit", help="of the tree that trained it")
    parser.add_argument("--merge", choices=MERGES, help="what a generation merges by default")
    parser.add_argument("--raw-tail", type=int, help="last tokens of a prompt that stay raw then")
    parser.add_argument("--priced", help="the same, as umim prune --keep-all wrote it")
    options = parser.parse_args(arguments)
    checkpoint = resolve_checkpoint(options.checkpoint).resolve()
    shipped = ASSETS / options.name / "checkpoint"
    recipe = find_recipe(options.recipe)
    if not isinstance(recipe, Recipe):
        parser.error(f"{options.recipe} trains no checkpoint")
    priced = None if options.priced is None else resolve_checkpoint(options.priced).resolve()
    recommended = {"merge": options.merge, "raw_tail": options.raw_tail}
    defaults = {name: value for name, value in recommended.items() if value is not None}
    measure = partial(results_of, checkpoint, recipe, options.commit)
    results = ship(checkpoint, shipped, measure, priced, defaults)
    file = RESULTS / f"{recipe.name}.json"
    file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for document in documents_of(file):
        document.write()
        print(document.path.relative_to(ROOT))
    write_sums()
    size = sum(path.stat().st_size for path in shipped.rglob("*") if path.is_file())
    print(f"{shipped.relative_to(ROOT)}: {size:,} bytes")


if __name__ == "__main__":
    with telling("tools.shipping"):
        main()
