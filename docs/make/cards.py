"""Model cards of the shipped merge checkpoints, from committed result files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from docs.make.document import RESULTS, ROOT, Document
from docs.make.results import TEMPLATES, read_results, shipped_parts
from tasks.report.adaptation import CLEARLY, adaptation_rows, clear, label
from tasks.report.render import Report, page
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.checkpoint_files import read_config, resolve_checkpoint
from umim_core.config.model_base import validated
from umim_core.config.recipe import Recipe
from umim_core.config.recipe_files import read_recipe_file
from umim_core.embedded.assets import embedded_names
from umim_core.errors import ConfigError, require

_ASSETS: Final = ROOT / "umim_core" / "embedded" / "assets"
_VERDICTS: Final = {
    1: "is clearly above the base model's",
    -1: "is clearly below the base model's",
    0: "does not differ clearly from the base model's",
}


def documents() -> list[Document]:
    """Return the card of every shipped checkpoint."""
    shipped = read_results(RESULTS / "shipped.json")
    shipped_cards = [
        Document(_ASSETS / name / "README.md", partial(docs_card, name, shipped))
        for name in shipped["checkpoints"]
    ]
    return [*shipped_cards, *model_cards(), *adapted_cards()]


def model_cards() -> Iterator[Document]:
    """Yield the card of every result file of a checkpoint for a packaged model."""
    for file in sorted(RESULTS.glob("*.json")):
        report = read_results(file)
        if report.get("benchmark") == "shipped_model":
            shown = report | shipped_parts(report)
            place = _ASSETS / report["checkpoint"] / "README.md"
            yield Document(place, lambda x=shown: page("shipped_card.md", x, TEMPLATES) + "\n")


def adapted_cards() -> Iterator[Document]:
    """Yield the card of every shipped checkpoint that notes the results of its adaptation."""
    for name in embedded_names("checkpoint"):
        place = resolve_checkpoint(name)
        if "results" in read_config(place).training:
            yield Document(place.parent / "README.md", partial(adapted_card, name))


def docs_card(name: str, results: Report) -> str:
    """Return the card of a checkpoint of an embedded backbone, whose form is the template's."""
    checkpoint, file = Checkpoint.load(name), ROOT / "infra" / "recipes" / "shipped.yaml"
    config, recipe = checkpoint.config, validated(Recipe, read_recipe_file(file), file.name)
    rows, d = config.rule_rows, config.hidden_size
    parameters = sum(p.numel() for p in checkpoint.module.parameters())
    form = ("learned positions", "last residual", f"{rows:,} rule rows", "preserved unit positions")
    fits = config.deviations() == form and parameters == 2 * d**2 + (11 + rows) * d
    rule, remedy = "the card must describe the checkpoint's form", "Correct docs_card.md."
    require(fits, ConfigError, rule, config.form(), remedy)
    rate = np.format_float_scientific(recipe.distill.learning_rate, trim="-", exp_digits=1)
    shown = {
        "name": name,
        "orders": checkpoint.rules.counts_by_order,
        "origin": checkpoint.rules.origin,
        "config": config,
        "parameters": parameters,
        "recipe": recipe,
        "rate": rate,
        "results": results,
        "metrics": results["checkpoints"][name],
    }
    return page("docs_card.md", shown, TEMPLATES) + "\n"


def adapted_card(name: str) -> str:
    checkpoint = Checkpoint.load(name)
    noted, tau = checkpoint.config.training, checkpoint.rules.options.tau
    file = RESULTS / f"{noted['results']}.json"
    report = read_results(file)
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
