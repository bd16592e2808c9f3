"""Graph of a recipe as text, with what every stage is given; tests hold it against files.

    7 filter [docs-llama tau 5 greedy+drop]
        counted: 6-count
        tokenized: 5-tokenize
        cell: recipe.cells[0]
        config: recipe.mining

An artifact is named by the stage that made it, a part of the recipe by where it stands there;
anything else is shown as it is. `python -m tests.support.flow_plans` writes the files again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from flows import parts
from tasks.plan.planner import Planner
from tasks.run.recipes import find_recipe
from tasks.run.stage import Artifact
from umim_core.config.any_recipe import AnyRecipe
from umim_core.config.model_base import Model
from umim_core.config.recipe import Recipe

GOLDEN: Final = Path(__file__).parents[1] / "flows" / "plans"
# Adaptation and shipped checkpoints; thresholds that share a count; rules by confidence; a corpus
# that a model generates, on GPUs; a mixture of corpora; a cell alone.
RECIPES: Final = (
    "embedded",
    "ablation-thresholds",
    "ablation-confidence",
    "deepscaler-1.5b-maths",
    "smollm2",
    "shipped",
)


class Recorder(Planner):
    """A plan that keeps what every stage is given.

    Attributes:
        given: Stage function, its arguments without the root, and the label.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.given: list[tuple[Callable[..., Artifact], tuple[object, ...], str]] = []

    def stage(
        self, function: Callable[..., Artifact], *args: object, label: str = "", setting: str = ""
    ) -> Artifact:
        self.given.append((function, args, label))
        return super().stage(function, *args, label=label, setting=setting)


def without_headline(recipe: AnyRecipe) -> Recipe:
    """Return a pipeline's recipe whose stages depend on nothing that a machine may lack."""
    assert isinstance(recipe, Recipe)
    return recipe.model_copy(update={"headline": None})


def plan_text(name: str) -> str:
    """Return the graph of a recipe."""
    recipe = without_headline(find_recipe(name))
    run: Any = Recorder(recipe)
    lines: list[str] = []
    cells, shipped = parts.run_everything(run)
    results = [*cells, *shipped]
    sections = dict(_sections(recipe))
    for number, (function, args, label) in enumerate(run.given, start=1):
        stage = run.steps[number - 1]["stage"]
        lines.append(f"{number} {stage} [{label}]" if label else f"{number} {stage}")
        given = inspect.signature(function).bind(Path(), *args).arguments
        del given["root"]
        lines += [
            f"    {parameter}: {_shown(value, run, sections)}" for parameter, value in given.items()
        ]
    for number, result in enumerate(results):
        lines.append(f"report: {type(result).__name__} {number}")
        for field, value in vars(result).items():
            entries = value if isinstance(value, dict) else {"": value}
            for key, entry in entries.items():
                name = " ".join(key) if isinstance(key, tuple) else key
                lines.append(f"    {field} {name}".rstrip() + f": {_shown(entry, run, sections)}")
    return "\n".join(lines) + "\n"


def _sections(model: Model, where: str = "recipe") -> Iterator[tuple[int, str]]:
    """Yield the models that a recipe is made of: their identity, and where they stand."""
    yield id(model), where
    for field in type(model).model_fields:
        value = getattr(model, field)
        if isinstance(value, Model):
            yield from _sections(value, f"{where}.{field}")
        elif isinstance(value, tuple):
            for number, part in enumerate(value):
                if isinstance(part, Model):
                    yield from _sections(part, f"{where}.{field}[{number}]")


def _shown(value: object, run: Planner, sections: dict[int, str]) -> str:
    if value is run.lease:
        return "the cluster of recipe.cluster"
    if isinstance(value, Artifact):
        return str(value.path)
    if isinstance(value, Path):
        return value.as_posix()
    return sections.get(id(value), repr(value))


def golden_path(name: str) -> Path:
    """Return the file that holds the graph of a recipe."""
    return GOLDEN / f"{name}.txt"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for recipe_name in RECIPES:
        golden_path(recipe_name).write_text(plan_text(recipe_name), encoding="utf-8")
