"""Recipes from files: YAML 1.2, and the kind that a recipe names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml

from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.config.model_base import validated
from umim_core.config.recipe import Recipe
from umim_core.config.table_recipe import TableRecipe
from umim_core.errors import ConfigError, did_you_mean, require
from umim_core.store.disk import read_bytes

AnyRecipe = Recipe | TableRecipe | AdaptationRecipe
_MAX_BYTES: Final = 1 << 18
_MOST_KEYS: Final = 1 << 14
# Plain words that are no text, as YAML 1.2 reads them (its core schema), and their first letters.
_WORDS: Final = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "merge": (r"<<", ["<"]),
    # Numbers of YAML 1.1, which 1.2 reads as others or as text: 010 is 8 or 10, 1:30 is 90 or text.
    "old": (
        r"[-+]?0[0-9_]+(\.[0-9_]*)?|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"
        r"|[-+]?0[bx][0-9a-fA-F_]+|[-+]?[0-9.]+_[0-9_.]*([eE][-+]?[0-9]+)?",
        list("-+.0123456789"),
    ),
}


class _Loader(yaml.SafeLoader):
    """Reads plain words as YAML 1.2 does, and refuses a key that is given twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value[:99]} is given twice, first in line {lines[key.value]}",
                    problem_mark=key.start_mark,
                )
            lines[str(key.value)] = key.start_mark.line + 1
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MOST_KEYS:  # merges of merges: tenfold with each level
            raise yaml.MarkedYAMLError(
                problem=f"merges must give {_MOST_KEYS:,} keys at most",
                problem_mark=node.start_mark,
            )


def _old_number(_: _Loader, node: yaml.ScalarNode) -> object:
    rule = "is one number in YAML 1.1 and another or text in 1.2"
    raise yaml.MarkedYAMLError(
        problem=f"{node.value[:99]} {rule}: write it in decimal digits, or in quotes for text",
        problem_mark=node.start_mark,
    )


_Loader.add_constructor("tag:yaml.org,2002:old", _old_number)
_Loader.yaml_implicit_resolvers = {}
for _name, (_shape, _first) in _WORDS.items():
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_name}", re.compile(f"(?:{_shape})$"), _first
    )


def read_recipe_file(path: Path) -> object:
    """Return what a YAML file holds, as YAML 1.2 reads it: ``yes`` is text."""
    try:
        text = read_bytes(path, _MAX_BYTES).decode("utf-8-sig")
        return yaml.load(text, Loader=_Loader)  # noqa: S506  a SafeLoader
    except FileNotFoundError as error:
        raise ConfigError(
            "a recipe file must exist", str(path), "`python -m flows recipes` lists the recipes."
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        found = where + ", ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(f"{path} must be YAML", found, "Correct the file.") from error
    except (
        OSError,
        ValueError,
        LookupError,
        AttributeError,
        RecursionError,
        yaml.YAMLError,
    ) as error:
        found = "values nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{path} must be YAML", found, "Correct the file.") from error


def load_any_recipe(path: Path) -> AnyRecipe:
    """Read and validate a recipe of the kind that its field ``kind`` names."""
    raw = read_recipe_file(path)
    kind = str(raw.get("kind", "pipeline")) if isinstance(raw, dict) else "pipeline"
    models: dict[str, type[AnyRecipe]] = {"pipeline": Recipe}
    models |= {"adaptation": AdaptationRecipe, "table": TableRecipe}
    rule = f"{path.name}: kind must be one of {', '.join(models)}"
    require(kind in models, ConfigError, rule, kind, did_you_mean(kind, list(models)))
    return validated(models[kind], raw, path.name)
