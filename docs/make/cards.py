"""Model cards of the shipped merge checkpoints, from committed result files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from docs.make.document import RESULTS, ROOT, Document
from docs.make.results import TEMPLATES, shipped_parts
from tasks.report.adaptation import CLEARLY, adaptation_rows, clear, label
from tasks.report.render import Report, page
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.checkpoint_files import CheckpointConfig, read_config, resolve_checkpoint
from umim_core.config.model_base import validated
from umim_core.config.recipe import Recipe
from umim_core.config.recipe_files import read_recipe_file
from umim_core.embedded.assets import embedded_names
from umim_core.errors import ConfigError
from umim_core.rules.ruleset import RuleSet

_ASSETS: Final = ROOT / "umim_core" / "embedded" / "assets"
# Parameters by (kind, depth, positions), of a module of size d.
_FORMULAS: Final = {
    ("attention", 1, "none"): "2d² + 7d",
    ("attention", 1, "learned"): "2d² + 11d",
    ("attention", 3, "none"): "10d² + 19d",
    ("attention", 3, "learned"): "10d² + 23d",
    ("linear", 1, "none"): "4d² + 3d",
}
_VERDICTS: Final = {
    1: "is clearly above the base model's",
    -1: "is clearly below the base model's",
    0: "does not differ clearly from the base model's",
}


def documents(results: Path = RESULTS) -> list[Document]:
    """Return the card of every shipped checkpoint."""
    shipped = json.loads((RESULTS / "shipped.json").read_text(encoding="utf-8"))
    file = ROOT / "infra" / "recipes" / "shipped.yaml"
    recipe = validated(Recipe, read_recipe_file(file), file.name)
    shipped_cards = [
        Document(
            _ASSETS / name / "README.md",
            partial(docs_card, name, Checkpoint.load(name), recipe, shipped, metrics),
        )
        for name, metrics in shipped["checkpoints"].items()
    ]
    return [*shipped_cards, *model_cards(results), *adapted_cards(results)]


def model_cards(results: Path = RESULTS) -> Iterator[Document]:
    """Yield the card of every result file of a checkpoint for a packaged model."""
    for file in sorted(results.glob("*.json")):
        report = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(report, dict) and report.get("benchmark") == "shipped_model":
            shown = report | shipped_parts(report)
            place = _ASSETS / report["checkpoint"] / "README.md"
            yield Document(place, lambda x=shown: page("shipped_card.md", x, TEMPLATES) + "\n")


def adapted_cards(results: Path = RESULTS) -> Iterator[Document]:
    """Yield the card of every shipped checkpoint that notes the results of its adaptation."""
    for name in embedded_names("checkpoint"):
        place = resolve_checkpoint(name)
        if "results" in read_config(place).training:
            yield Document(place.parent / "README.md", partial(adapted_card, name, results))


def docs_card(
    name: str,
    checkpoint: Checkpoint,
    recipe: Recipe,
    results: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> str:
    """Return the card of a checkpoint of an embedded backbone, of any form."""
    rules, config = checkpoint.rules, checkpoint.config
    workers = max(1, recipe.cluster.workers)  # none: in the process itself
    unit = "GPU" if recipe.cluster.use_gpu else "CPU core"
    rate = np.format_float_scientific(recipe.distill.learning_rate, trim="-", exp_digits=1)
    formula = _FORMULAS[config.kind, config.depth, config.module_positions]
    shown = {
        "name": name,
        "orders": rules.counts_by_order,
        "origin": _origin(rules),
        "rules": rules.options,
        "form": _form(config),
        "parameters": sum(p.numel() for p in checkpoint.module.parameters()),
        "formula": formula + (f" + {config.rule_rows}d" if config.rule_rows else ""),
        "training": config.training,
        "distill": recipe.distill,
        "recipe": recipe,
        "rate": rate,
        "place": f"one {unit}" if workers == 1 else f"{workers} {unit}s",
        "results": results,
        "metrics": metrics,
    }
    return page("docs_card.md", shown, TEMPLATES) + "\n"


def _form(config: CheckpointConfig) -> str:
    """Return the form of a module in words."""
    placed = "" if config.unit_positions == "compact" else ", preserved unit positions"
    placed += "" if config.residual == "none" else f", {config.residual} residual"
    placed += f", {config.rule_rows:,} rule rows" if config.rule_rows else ""
    size = f"d {config.hidden_size}"
    if config.kind == "linear":
        return f"one linear layer over the span's embeddings side by side, {size}{placed}"
    layers = "attention pooling"
    if config.depth > 1:
        layers = f"{config.depth - 1} layers of self-attention over the span, then {layers}"
    heads = f"{size}, {config.num_heads} heads"
    return f"{layers}, {heads}, positions `{config.module_positions}`{placed}"


def _origin(rules: RuleSet) -> str:
    """Return in words what made the rules."""
    if rules.options.source == "explicit":
        return "given as a list"
    spans = {
        "frequency": "mined on the docstring corpus at",
        "confidence": "spans of the docstring corpus that the backbone is confident about,",
    }
    dearest = rules.origin.max_damage
    bound = "" if dearest is None else f", of at most {dearest:.2f} nats of damage per saved token"
    return f"{spans[rules.options.source]} tau {rules.options.tau}{bound}"


def adapted_card(name: str, results: Path) -> str:
    checkpoint = Checkpoint.load(name)
    noted, tau = checkpoint.config.training, checkpoint.rules.options.tau
    file = results / f"{noted['results']}.json"
    report: Report = json.loads(file.read_text(encoding="utf-8"))
    own = {"setting": noted["setting"], "tau": tau, "seed": noted["seed"]}
    points = [
        (place, point)
        for place in report["backbones"]
        if place["checkpoint"] == noted["start"]
        for point in place["points"]
        if own.items() <= point.items()
    ]
    if not points:
        raise ConfigError(f"{file.name} must hold the point of {name}", own, "Ship it again.")
    place, point = points[0]
    rows = [row for row in adaptation_rows(place) if row["tau"] in (None, tau)]
    (shipped,) = [row for row in rows if row["setting"] == own["setting"]]
    base = place["base"]
    accuracy = {"mean": base["accuracy"], "std": base.get("accuracy_se")}
    shown = [{"setting": "base", "token_reduction": 0.0, "accuracy": accuracy}]
    shown += [row | {"seeds": row["seeds"] or None} for row in rows]
    card_values = {
        "name": Path(name).name,
        "adaptation": report["name"],
        "results": noted["results"],
        "point": point,
        "shown": shown,
        "label": label(shipped),
        "verdict": _VERDICTS[clear(shipped["difference"], shipped["reach"])],
        "clearly": CLEARLY,
        "rules": len(checkpoint.rules),
        "parameters": sum(p.numel() for p in checkpoint.module.parameters()),
    }
    return page("adapted_card.md", report | place | own | card_values, TEMPLATES) + "\n"
