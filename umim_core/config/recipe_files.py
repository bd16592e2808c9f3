"""Recipes from files: YAML 1.2 of a bounded size, and the kind that a recipe names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import yaml

from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.config.model_base import validated
from umim_core.config.recipe import Recipe
from umim_core.config.table_recipe import TableRecipe
from umim_core.encodable import encoding_error
from umim_core.errors import ConfigError, look_up
from umim_core.store.disk import read_bytes

AnyRecipe = Recipe | TableRecipe | AdaptationRecipe
_MAX_BYTES: Final = 1 << 18
_MAX_VALUES: Final = 20_000  # with every alias written out
_MAX_DIGITS: Final = 100
_TAG: Final = "tag:yaml.org,2002:"
_TAGS: Final = frozenset({_TAG + "str", _TAG + "seq", _TAG + "map"})
# Plain words as YAML 1.2 reads them (its core schema).
_WORDS: Final[dict[str, object]] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INT: Final = re.compile(r"[-+]?(0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT: Final = re.compile(
    r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
# Numbers that YAML 1.1 reads, and 1.2 as others or as text: 010 is 8 or 10, 1:30 is 90 or text.
_OLD_NUMBER: Final = re.compile(
    r"[-+]?0[0-9_]+(\.[0-9_]*)?|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"
    r"|[-+]?0[bx][0-9a-fA-F_]+|[-+]?[0-9.]+_[0-9_.]*([eE][-+]?[0-9]+)?"
)


def _value(node: yaml.Node, left: Iterator[int]) -> object:
    """Return what a node stands for; each takes one of those that are left.

    An alias is written out, so their number bounds everything.
    """
    if next(left, None) is None:
        raise _refusal(node.start_mark, f"aliases must stand for {_MAX_VALUES:,} values at most")
    if node.tag not in _TAGS:
        raise _refusal(node.start_mark, f"the tag {node.tag[:99]} is not read: leave it out")
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, left) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, left)
    return _scalar(node) if isinstance(node, yaml.ScalarNode) else None


def _mapping(node: yaml.MappingNode, left: Iterator[int]) -> dict[str, object]:
    lines: dict[str, int] = {}
    mapping: dict[str, object] = {}
    defaults: dict[str, object] = {}
    for key, value in node.value:
        mark = key.start_mark
        name = key.value if isinstance(key, yaml.ScalarNode) else None
        if name is None:
            raise _refusal(mark, "a key must be a word")
        if name in lines:
            first = lines[name] + 1
            raise _refusal(mark, f"{name[:99]} is given twice, first in line {first}")
        lines[name] = mark.line
        _check_text(key)
        if name == "<<" and key.style is None:  # keys of other mappings, for those not given
            parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for part in reversed(parts):  # the first one wins
                merged = _value(part, left)
                if not isinstance(merged, dict):
                    raise _refusal(part.start_mark, "<< takes a mapping, or a list of mappings")
                defaults |= merged
        else:
            mapping[name] = _value(value, left)
    return defaults | mapping


def _scalar(node: yaml.ScalarNode) -> object:
    text: str = node.value
    _check_text(node)
    if node.style is not None:  # quoted, or a block
        return text
    if text in _WORDS:
        return _WORDS[text]
    integer, real = _INT.fullmatch(text), _FLOAT.fullmatch(text)
    if (integer or real) and len(text) > _MAX_DIGITS:
        raise _refusal(node.start_mark, f"a number must have {_MAX_DIGITS} digits at most")
    if integer:
        return int(text, 0)
    if real:
        return float(re.sub(r"\.(?=[iInN])", "", text))
    if _OLD_NUMBER.fullmatch(text):
        raise _refusal(
            node.start_mark,
            f"{text[:99]} is one number in YAML 1.1 and another or text in 1.2: "
            "write it in decimal digits, or in quotes for text",
        )
    return text


def _check_text(node: yaml.ScalarNode) -> None:
    if encoding_error(node.value) is not None:
        raise _refusal(node.start_mark, "text must not hold lone surrogates")


def _refusal(mark: yaml.Mark, rule: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=rule, problem_mark=mark)


def read_recipe_file(path: Path) -> object:
    """Return what a YAML file holds, as YAML 1.2 reads it.

    What 1.1 reads in another way is an error (``010``, ``1:30``, ``1_000``), or text (``yes``).
    """
    try:
        text = read_bytes(path, _MAX_BYTES).decode("utf-8-sig")
        node = yaml.compose(text, Loader=yaml.BaseLoader)
        return None if node is None else _value(node, iter(range(_MAX_VALUES)))
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
    return validated(look_up(models, kind, f"{path.name}: kind"), raw, path.name)
