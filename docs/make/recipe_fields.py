"""``docs/recipe-fields.md``, from the JSON schemas of the models that validate recipes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

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
_NAMES: Final = {"string": "text", "boolean": "true, false"}
_BOUNDS: Final = {
    "exclusiveMinimum": ">",
    "minimum": ">=",
    "exclusiveMaximum": "<",
    "maximum": "<=",
    "minLength": "length >=",
    "minItems": "length >=",
    "minProperties": "length >=",
}
_Schema = dict[str, Any]


def documents() -> list[Document]:
    return [Document(ROOT / "docs" / "recipe-fields.md", page)]


def page() -> str:
    models: dict[str, _Schema] = {}
    for root in (Recipe, TableRecipe, AdaptationRecipe):
        schema = root.model_json_schema()
        models |= {root.__name__: schema} | schema["$defs"]
    summaries = {name: _summary(model) for name, model in models.items()}
    return _HEAD + "".join(_section(name, model, summaries) for name, model in models.items())


def _summary(model: _Schema) -> str:
    text: str = model.get("description", "")
    return text.split("\n\n")[0].replace("\n", " ")


def _section(name: str, model: _Schema, summaries: Mapping[str, str]) -> str:
    rows = "".join(
        _row(field, schema, field in model.get("required", ()), summaries)
        for field, schema in model["properties"].items()
    )
    table = f"| field | type | default | meaning |\n| :-- | :-- | :-- | :-- |\n{rows}"
    return f"\n## {name}\n{summaries[name]}\n\n{table}"


def _row(name: str, schema: _Schema, required: bool, summaries: Mapping[str, str]) -> str:
    default = "its defaults" if "$ref" in schema else json.dumps(schema.get("default", {}))
    if required:
        default = "**required**"
    cells = (f"`{name}`", _shown(schema), default, _meaning(schema, summaries))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _meaning(schema: _Schema, summaries: Mapping[str, str]) -> str:
    """Return what is said of a field, or of the one section that it holds."""
    if "description" in schema:
        return str(schema["description"])
    if "const" in schema:
        return "Tells this section from others."
    parts = schema.get("anyOf", [schema.get("items", schema)])
    sections = [part["$ref"].rpartition("/")[2] for part in parts if "$ref" in part]
    return summaries[sections[0]] if len(sections) == 1 else ""


def _shown(schema: _Schema) -> str:
    """Return a type as YAML knows it, with its bounds."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if parts := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(map(_shown, parts))
    if values := schema.get("enum") or [schema[key] for key in ("const",) if key in schema]:
        return ", ".join(f"`{value}`" for value in values)
    kind: str = schema["type"]
    if kind == "array":
        kind = f"list of {_shown(schema['items'])}"
    elif kind == "object":
        kinds = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties")]
        kind = f"mapping to {_shown(kinds[0])}"
    bounds = [f"{sign} {schema[bound]}" for bound, sign in _BOUNDS.items() if bound in schema]
    return _NAMES.get(kind, kind) + (f" ({', '.join(bounds)})" if bounds else "")
