"""``docs/recipe-fields.md``, from the models that validate recipes."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs.make.document import ROOT, Document
from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.config.recipe import Recipe
from umim_core.config.table_recipe import TableRecipe

_HEAD: Final = """\
# Fields of a recipe

Made from the models that validate recipes by `python -m docs.make recipe-fields`; a test holds it
to them. A recipe is a YAML file: `Recipe` for the pipeline, `TableRecipe` (`kind: table`) for a
table of the paper, `AdaptationRecipe` (`kind: adaptation`) for the curves of one task. Fields
without a default must be given; unknown fields are refused.
"""
_BOUNDS: Final = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "min_length": "length >="}


def documents() -> list[Document]:
    return [Document(ROOT / "docs" / "recipe-fields.md", page)]


def page() -> str:
    models = dict.fromkeys(
        model for root in (Recipe, TableRecipe, AdaptationRecipe) for model in _models(root)
    )
    return _HEAD + "".join(_section(model) for model in models)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models of a type: itself, then those of its fields, depth first."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from _models(field.annotation)
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
