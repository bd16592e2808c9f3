"""What a recipe would run: its stages in order, without running any."""

from __future__ import annotations

from umim_core.backbone_config import BackboneRecipe
from umim_core.config import Cell, Recipe


def plan(recipe: Recipe | BackboneRecipe) -> list[dict[str, str]]:
    """Return the stages of a recipe in order, each with what it works on."""
    if isinstance(recipe, BackboneRecipe):
        return [
            {"stage": "corpus", "of": recipe.corpus.kind},
            {"stage": "tokenizer", "of": f"{recipe.vocab_size} entries"},
            {"stage": "tokenize", "of": recipe.name},
            {"stage": "backbone", "of": f"{recipe.name}, at most {recipe.train.max_steps} steps"},
        ]
    steps = [("corpus", recipe.corpus.kind)]
    has_task = recipe.task is not None and recipe.corpus.kind == "docstrings"
    steps += [("task", "embedded questions")] if has_task else []
    for name in dict.fromkeys(cell.backbone for cell in recipe.cells):
        steps += [("tokenize", name), ("count", f"{name}, tau {_least(recipe, name)}")]
    steps += [("filter", _label(cell)) for cell in recipe.cells]
    steps += [
        ("distill", f"{_label(cell)}, at most {recipe.distill.max_steps} steps")
        for cell in recipe.cells
    ]
    for cell in recipe.cells:
        if cell.adapt and recipe.adapt is not None:
            steps += [
                ("task-rules", _label(cell)),
                ("sft", f"{_label(cell)}, at most {recipe.adapt.sft.max_steps} steps"),
                ("dpo", f"{_label(cell)}, at most {recipe.adapt.dpo.max_steps} steps"),
            ]
    measured = [*map(_label, recipe.cells), *(f"{name} (shipped)" for name in recipe.shipped)]
    steps += [("evaluate", name) for name in measured]
    steps += [("benchmark", name) for name in measured] if recipe.benchmark else []
    steps.append(("report", recipe.name))
    return [{"stage": stage, "of": what} for stage, what in steps]


def _least(recipe: Recipe, backbone: str) -> int:
    return min(cell.tau for cell in recipe.cells if cell.backbone == backbone)


def _label(cell: Cell) -> str:
    return f"{cell.backbone}, tau {cell.tau}, {cell.overlap} + {cell.containment}"
