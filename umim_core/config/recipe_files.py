"""Recipes from files: YAML 1.2 of a bounded size, and the kind that a recipe names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn

import yaml

from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.config.model_base import validated
from umim_core.config.recipe import Recipe
from umim_core.config.table_recipe import TableRecipe
from umim_core.errors import ConfigError, did_you_mean, require
from umim_core.store.disk import read_bytes

AnyRecipe = Recipe | TableRecipe | AdaptationRecipe
_MAX_BYTES: Final = 1 << 18
_TAG: Final = "tag:yaml.org,2002:"
_MERGE: Final = _TAG + "merge"
_OLD: Final = "!1.1"  # numbers that YAML 1.1 reads, and 1.2 as others or as text: 010, 1:30
_STARTS: Final = list("-+.0123456789")
# Plain words as YAML 1.2 reads them (its core schema), with what they may begin with.
_WORDS: Final = (
    (_TAG + "null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (_TAG + "bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    (_TAG + "int", r"[-+]?(0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+", _STARTS),
    (
        _TAG + "float",
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        _STARTS,
    ),
    (
        _OLD,
        r"[-+]?0[0-9_]+(\.[0-9_]*)?|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"
        r"|[-+]?0[bx][0-9a-fA-F_]+|[-+]?[0-9.][0-9_.]*_[0-9_.]*([eE][-+]?[0-9]+)?",
        _STARTS,
    ),
    (_MERGE, "<<", ["<"]),
)


class _Loader(yaml.SafeLoader):
    """Reads plain words as YAML 1.2 does; a key is a text, and given once."""

    # None of YAML 1.1.
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]  # stubs

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            mark = key.start_mark
            if not isinstance(key, yaml.ScalarNode):
                raise _refusal(mark, "a key must be a word")
            if key.value in lines:
                first = lines[key.value] + 1
                rule = f"{key.value[:99]} is given twice, first in line {first}"
                raise _refusal(mark, rule)
            lines[key.value] = mark.line
            key.tag = key.tag if key.tag == _MERGE else _TAG + "str"
        return node

    def old_number(self, node: yaml.ScalarNode) -> NoReturn:
        raise _refusal(
            node.start_mark,
            f"{node.value[:99]} is one number in YAML 1.1 and another or text in 1.2: "
            "write it in decimal digits, or in quotes for text",
        )


for _tag, _words, _first in _WORDS:
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_words})\Z"), _first)
_Loader.add_constructor(_OLD, _Loader.old_number)


def _refusal(mark: yaml.Mark, rule: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=rule, problem_mark=mark)


def read_recipe_file(path: Path) -> object:
    """Return what a YAML file holds, as YAML 1.2 reads it.

    What 1.1 reads in another way is an error (``010``, ``1:30``, ``1_000``), or text (``yes``).
    """
    try:
        text = read_bytes(path, _MAX_BYTES).decode("utf-8-sig")
        return yaml.load(text, Loader=_Loader)  # noqa: S506  a safe one
    except FileNotFoundError as error:
        raise ConfigError(
            "a recipe file must exist", str(path), "`python -m flows recipes` lists the recipes."
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        found = where + ", ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(f"{path} must be YAML", found, "Correct the file.") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
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
