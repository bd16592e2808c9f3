"""Write ``docs/recipe-fields.md`` from the models that validate recipes.

python infra/scripts/recipe_fields.py
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from umim_core.config.backbone_recipe import BackboneRecipe  # noqa: E402
from umim_core.config.recipe import Recipe  # noqa: E402

PAGE: Final = ROOT / "docs" / "recipe-fields.md"
HEAD: Final = """\
# Fields of a recipe

Made from the models that validate recipes by `python infra/scripts/recipe_fields.py`; a test holds
it to them. A recipe is a YAML file: `Recipe` for the pipeline, `BackboneRecipe` (`kind: backbone`)
for a small language model. Fields without a default must be given; unknown fields are refused.
"""
_BOUNDS: Final = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "min_length": "length >="}


def page() -> str:
    """Return the whole page."""
    seen: list[type[BaseModel]] = []
    for root in (Recipe, BackboneRecipe):
        _collect(root, seen)
    return HEAD + "".join(_section(model) for model in seen)


def _collect(model: type[BaseModel], seen: list[type[BaseModel]]) -> None:
    if model in seen:
        return
    seen.append(model)
    for field in model.model_fields.values():
        for inner in _models(field.annotation):
            _collect(inner, seen)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _section(model: type[BaseModel]) -> str:
    summary = (model.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
    rows = "".join(_row(name, field) for name, field in model.model_fields.items())
    table = f"| field | type | default | meaning |\n| :-- | :-- | :-- | :-- |\n{rows}"
    return f"\n## {model.__name__}\n{' '.join(summary.split())}\n\n{table}"


def _row(name: str, field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(item, bound)}"
        for item in field.metadata
        for bound, sign in _BOUNDS.items()
        if getattr(item, bound, None) is not None
    ]
    kind = ", ".join([_shown(field.annotation), *bounds])
    default = (
        "**required**"
        if field.is_required()
        else _default(field.get_default(call_default_factory=True))
    )
    cells = (f"`{name}`", kind, default, field.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(value: object) -> str:
    if isinstance(value, BaseModel):
        return "its defaults"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return "{}" if value == {} else f"{value}" or '""'


def _shown(annotation: Any) -> str:
    """Return a type as YAML knows it."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _shown(args[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join(_shown(part) for part in args)
    if origin is tuple:
        return f"list of {_shown(args[0])}"
    if origin is dict:
        return f"mapping to {_shown(args[1])}"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    names = {int: "integer", float: "number", str: "text", bool: "true, false"}
    return names.get(annotation, str(annotation))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
