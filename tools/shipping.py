"""Shipping of a trained checkpoint: into the package, with its results, their page and its card.

python -m tools.shipping CHECKPOINT --recipe smollm2 --name umim-smollm2-135m

CHECKPOINT is the directory that a finished run printed. Its measurements and its corpus are found
by the digests that each stage records of what it was given. What ships is stored smaller: the
module in bfloat16 (``--weights float32`` keeps it), the rules without the matcher's tables,
which are built in memory. What the rounding changes is measured and stands in the results.
``--priced DIR``, made of it by ``umim prune --keep-all``, adds prices and the bound of decoding;
``--merge`` and ``--raw-tail`` are what it recommends to its users.

python -m tools.shipping CHECKPOINT --adapted adaptation-NAME --name umim-docs-llama-adapted

An adapted one has its figures in ``docs/results/adaptation-NAME.json`` already. It ships in
float32, as it was measured, and its backbone is found by name.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, Final

from safetensors.torch import load_file

from docs.make.benchmark_rows import part_label
from docs.make.cards import adapted_cards, model_cards
from docs.make.document import RESULTS, ROOT, Document
from docs.make.results import documents_of
from tasks.run.recipes import find_recipe
from tasks.run.stage import Artifact
from tasks.stages.corpus import RECORD, parts
from tasks.stages.evaluate import rows_of
from tools.shipped_form import DTYPES, TABLE, store
from tools.shipping_trail import adapted_point, trail
from umim_core.checkpoint.checkpoint_files import (
    CheckpointConfig,
    read_config,
    resolve_checkpoint,
)
from umim_core.config.form import MERGES
from umim_core.config.recipe import DEFAULT_TASK, Recipe
from umim_core.errors import ConfigError
from umim_core.evaluation.alignment import evaluate_alignment
from umim_core.model.umim import UMIM
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import (
    read_json,
    sha256_file,
)
from umim_core.store.publication import publish_directory

ASSETS: Final = ROOT / "umim_core" / "embedded" / "assets"
SUMS: Final = ROOT / "tests" / "embedded" / "assets.sha256"
MAX_RULES_BYTES: Final = 4 << 20
_ROUNDING_ROWS: Final = 8


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
    stages, config = trail(checkpoint, recipe), read_config(checkpoint)
    facts, metrics = stages.distilled.manifest()["facts"], stages.evaluated.metrics
    names = ["", *(f"_part_{name}" for name in parts(stages.tokenized))]
    rules, ships = RuleSet.load(shipped / "rules"), read_config(shipped)
    batch, length = recipe.distill.batch_size, recipe.segment_length
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
            "origin": rules.origin.described(),
            "bytes": (shipped / "rules" / TABLE).stat().st_size,
        },
        "corpus": _corpus(stages.corpus),
        "corpus_tokens": {
            split: stages.tokenized.metrics[f"tokens_{split}"] for split in ("train", "valid")
        },
        "protocol": recipe.evaluate.model_dump(),
        "texts": {part_label(s): text_figures(metrics, s) for s in names},
        "task_name": _task_name(stages.scores),
        "task": {side: score.metrics for side, score in stages.scores.items()},
        "rounding": _rounding(stages.tokenized, recipe, {"run": checkpoint, "shipped": shipped}),
    }


def text_figures(metrics: Mapping[str, float], suffix: str) -> dict[str, Any]:
    """Return the figures of one text, means with their standard errors.

    Args:
        metrics: Of the stage ``evaluate``.
        suffix: Behind the names of the text's numbers.
    """

    def measured(name: str, error: str) -> dict[str, float | None]:
        return {"mean": metrics[name + suffix], "std": metrics.get(error + suffix)}

    plain = ("token_reduction", "spans_per_row", "aligned_rows", "ppl_base", "ppl_umim")
    return (
        {name: measured(name, f"{name}_se") for name in ("top1", "top10", "mrr", "kl")}
        | {name: metrics[name + suffix] for name in (*plain, "ppl_token_reduction")}
        | {"nats_increase": measured("nats_increase", "nats_increase_se")}
    )


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
    figures: dict[str, object] = {"rows": len(rows)}
    for name, path in checkpoints.items():
        merged_model = UMIM.from_pretrained(path, dtype="float32").merged_model
        means = evaluate_alignment(rows, merged_model, recipe.evaluate.batch_size).means
        figures[name] = {metric: means[metric] for metric in ("kl", "top1")}
    return figures


def ship(
    checkpoint: Path,
    shipped: Path,
    recipe: Recipe,
    weights: str = "bfloat16",
    commit: str | None = None,
    priced: Path | None = None,
    defaults: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Store and measure a checkpoint; only then is what ships replaced.

    Args:
        checkpoint: The run's checkpoint.
        shipped: Where it goes.
        recipe: What was run.
        weights: Data type of the stored module.
        commit: Of the source tree that trained it.
        priced: As in ``store``.
        defaults: As in ``store``.

    Returns:
        Its results.

    Raises:
        ConfigError: If its rules are too large, or it was not run as the recipe says.
    """
    with TemporaryDirectory() as folder:
        new_checkpoint = Path(folder) / shipped.parent.name / shipped.name
        store(checkpoint, new_checkpoint, weights, priced, defaults)
        _check_rules(new_checkpoint)
        results = results_of(checkpoint, new_checkpoint, recipe, commit)
        _replace(shipped, new_checkpoint)
    return results


def ship_adapted(checkpoint: Path, shipped: Path, results: Path) -> None:
    """Store an adapted checkpoint with a note of its setting and of its results.

    Its setting and threshold are to be named before test questions are scored, as the card says.

    Args:
        checkpoint: The run's checkpoint.
        shipped: Where it goes; what is there is replaced.
        results: Content of the run's ``adaptation.json``, among the committed results.

    Raises:
        ConfigError: If its rules are too large, it is not of the first seed, or the results are
            not of it.
    """
    report = json.loads(results.read_text(encoding="utf-8"))
    place, point = adapted_point(checkpoint, report)
    if point["seed"] != report["seeds"][0]:
        raise ConfigError(
            "a checkpoint that ships must be of the first seed, not of the best one",
            point["seed"],
            f"Name the checkpoint of seed {report['seeds'][0]}.",
        )
    noted = {"setting": point["setting"], "start": place["checkpoint"], "results": results.stem}
    training = read_config(checkpoint).training | noted
    with TemporaryDirectory() as folder:
        new_checkpoint = Path(folder) / shipped.name
        store(checkpoint, new_checkpoint, "float32", defaults={"training": training})
        _check_rules(new_checkpoint)
        _replace(shipped, new_checkpoint)


def _check_rules(new_checkpoint: Path) -> None:
    size = (new_checkpoint / "rules" / TABLE).stat().st_size
    if size > MAX_RULES_BYTES:
        raise ConfigError(
            f"shipped rules must take at most {MAX_RULES_BYTES} bytes",
            size,
            "Raise tau, or set rule_budget.",
        )


def _replace(shipped: Path, new_checkpoint: Path) -> None:
    shutil.rmtree(shipped, ignore_errors=True)
    publish_directory(shipped, partial(shutil.copytree, new_checkpoint, dirs_exist_ok=True))


def write_sums(assets: Path = ASSETS, sums: Path = SUMS) -> None:
    """Write the digests of all shipped files, as ``sha256sum`` prints them."""
    names = sorted(
        path.relative_to(assets).as_posix() for path in assets.rglob("*") if path.is_file()
    )
    lines = [f"{sha256_file(assets / name)}  {name}\n" for name in names]
    sums.write_text("".join(lines), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Ship a checkpoint."""
    parser = argparse.ArgumentParser(prog="tools.shipping", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="directory, as the run printed it")
    parser.add_argument("--recipe", default="smollm2", help="what was run")
    parser.add_argument("--name", default="umim-smollm2-135m", help="what it will be called")
    parser.add_argument("--weights", choices=DTYPES, default="bfloat16")
    parser.add_argument("--commit", help="of the tree that trained it")
    parser.add_argument("--merge", choices=MERGES, help="what a generation merges by default")
    parser.add_argument("--raw-tail", type=int, help="last tokens of a prompt that stay raw then")
    parser.add_argument("--priced", help="the same, as umim prune --keep-all wrote it")
    parser.add_argument("--adapted", metavar="NAME", help="of its results, adaptation-...")
    options = parser.parse_args(arguments)
    checkpoint = resolve_checkpoint(options.checkpoint).resolve()
    shipped = ASSETS / options.name / "checkpoint"
    if options.adapted:
        ship_adapted(checkpoint, shipped, RESULTS / f"{options.adapted}.json")
        _finish(shipped, adapted_cards())
        return
    recipe = find_recipe(options.recipe)
    if not isinstance(recipe, Recipe):
        parser.error(f"{options.recipe} trains no checkpoint")
    priced = None if options.priced is None else resolve_checkpoint(options.priced).resolve()
    recommended = {"merge": options.merge, "raw_tail": options.raw_tail}
    defaults = {name: value for name, value in recommended.items() if value is not None}
    results = ship(checkpoint, shipped, recipe, options.weights, options.commit, priced, defaults)
    file = RESULTS / f"{recipe.name}.json"
    file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    _finish(shipped, [*model_cards(), *documents_of(file)])


def _finish(shipped: Path, documents: Iterable[Document]) -> None:
    """Write what is made of a shipped checkpoint's results, and the list of digests."""
    for document in documents:
        document.write()
        print(document.path.relative_to(ROOT))
    write_sums()
    size = sum(path.stat().st_size for path in shipped.rglob("*") if path.is_file())
    print(f"{shipped.relative_to(ROOT)}: {size:,} bytes")


if __name__ == "__main__":
    main()
