"""Recipes from files: YAML 1.2 of a bounded size, and the kind that a recipe names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, NoReturn

import yaml

from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.config.model_base import validated
from umim_core.config.recipe import Recipe
from umim_core.config.table_recipe import TableRecipe
from umim_core.errors import ConfigError, look_up
from umim_core.store.disk import read_bytes

AnyRecipe = Recipe | TableRecipe | AdaptationRecipe
_MAX_BYTES: Final = 1 << 18
_MAX_ALIASES: Final = 256
_MAX_DIGITS: Final = 99
_TAG: Final = "tag:yaml.org,2002:"
_MERGE: Final = f"{_TAG}merge"
_OLD_NUMBER: Final = "!old-number"
# Plain words as YAML 1.2 reads them (its core schema), and numbers that YAML 1.1 reads, and 1.2 as
# others or as text: 010 is 8 or 10, 1:30 is 90 or text.
_WORDS: Final = {
    f"{_TAG}null": r"~?|null|Null|NULL",
    f"{_TAG}bool": r"true|True|TRUE|false|False|FALSE",
    f"{_TAG}int": r"[-+]?(0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+",
    f"{_TAG}float": r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    _MERGE: "<<",
    _OLD_NUMBER: r"[-+]?0[0-9_]+(\.[0-9_]*)?|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"
    r"|[-+]?0[bx][0-9a-fA-F_]+|[-+]?[0-9.]+_[0-9_.]*([eE][-+]?[0-9]+)?",
}


class _Loader(yaml.SafeLoader):
    aliases = 0

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Read a mapping; its keys are words, each given once."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                _refuse(key, "a key must be a word")
            if key.value in lines:
                name, first = key.value[:99], lines[key.value] + 1
                _refuse(key, f"{name} is given twice, first in line {first}")
            lines[key.value] = key.start_mark.line
            key.tag = _MERGE if key.tag == _MERGE else f"{_TAG}str"
        return node

    def fetch_tag(self) -> NoReturn:
        mark = self.get_mark()
        raise yaml.MarkedYAMLError(problem="tags are not read: leave it out", problem_mark=mark)

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            self.aliases += 1
            if self.aliases > _MAX_ALIASES:
                rule = f"a file must hold {_MAX_ALIASES} aliases at most"
                raise yaml.MarkedYAMLError(problem=rule, problem_mark=self.get_mark())
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Write out `<<`, each key once: of mappings in mappings they would multiply."""
        super().flatten_mapping(node)
        node.value = list({key.value: (key, value) for key, value in node.value}.values())

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > _MAX_DIGITS:
            _refuse(node, f"a number must have {_MAX_DIGITS} digits at most")
        number: int = super().construct_yaml_int(node)
        return number

    def construct_old_number(self, node: yaml.ScalarNode) -> NoReturn:
        rule = f"{node.value[:99]} is one number in YAML 1.1 and another or text in 1.2: "
        _refuse(node, rule + "write it in decimal digits, or in quotes for text")


_Loader.yaml_implicit_resolvers = {}  # not those of YAML 1.1
for _tag, _shape in _WORDS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_shape})\Z"), None)
_Loader.add_constructor(f"{_TAG}int", _Loader.construct_yaml_int)
_Loader.add_constructor(_OLD_NUMBER, _Loader.construct_old_number)


def _refuse(node: yaml.Node, rule: str) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=rule, problem_mark=node.start_mark)


def read_recipe_file(path: Path) -> object:
    """Return what a YAML file holds, as YAML 1.2 reads it.

    What 1.1 reads in another way is an error (``010``, ``1:30``, ``1_000``), or text (``yes``).
    """
    try:
        text = read_bytes(path, _MAX_BYTES).decode("utf-8-sig")
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        found = where + ", ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(f"{path} must be YAML", found, "Correct the file.") from error
    except UnicodeDecodeError as error:
        found = f"byte {error.start + 1} of it is not UTF-8"
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
    return validated(look_up(models, kind, f"{path.name}: kind"), raw, path.name)
