"""Places in JSON that may merge: of a tool's schema, and of its result.

What a call must spell of a schema stays raw: names of functions and of parameters, up to the quotes
that end them, types of values but for texts, and values to choose from, as ``enum`` and ``const``
list them; names under ``required`` merge. In results that are JSON, numbers and short values stay
raw, since answers repeat them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

Place = tuple[int, int]  # first character, end excluded
# Texts of JSON, with the colon behind a key, brackets and other values, each read once.
_JSON: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"(?:\s*:)?|[{}\[\]]|[^\s{}\[\],:"]+')
_CHOICES: Final = ('"enum"', '"const"')
_TYPE: Final = '"type"'
_UNSPELLED: Final = ('"function"', '"string"', '"object"', '"dict"')  # types that calls do not show
_SHORT: Final = 32  # characters of a value in JSON; a longer text is prose
_PROPERTIES: Final = '"properties"'
_PARAMETERS: Final = ('"parameters"', '"parameter_definitions"')
# Keys whose object has names, not keys of a schema.
_MAPS: Final = tuple(
    f'"{key}"'
    for key in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
)


def places_of(role: str, text: str, start: int = 0) -> list[Place]:
    """Return the places of a text, which begins at ``start``, that may merge in its role.

    They lie between what calls must spell of a schema, or between the short values of a result.
    """
    raw: Iterable[Place] = ()
    if role == "tools":
        raw = sorted(_spelled(text))
    elif role == "tool" and is_json(text):
        raw = _values(text)
    borders = [0, *(border for place in raw for border in place), len(text)]
    pairs = zip(borders[::2], borders[1::2], strict=True)
    return [(start + first, start + end) for first, end in pairs if first < end]


def is_json(text: str) -> bool:
    """Return whether a text is an object or a list of JSON."""
    text = text.strip()
    if not text.startswith(("{", "[")):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _values(result: str) -> Iterator[Place]:
    """Yield where JSON has numbers and values of few characters, texts without their quotes."""
    for found in _JSON.finditer(result):
        text, first, end = found[0], *found.span()
        if text[-1] in ":{}[]":
            continue
        if text[0] == '"':
            size = end - first - 2
            if size == 0 or (size > _SHORT and len(json.loads(text)) > _SHORT):
                continue
            first, end = first + 1, end - 1
        yield first, end


def _spelled(schema: str) -> Iterator[Place]:
    """Yield where a schema as JSON has names, keys of ``properties`` among them, and choices.

    Where parameters have no ``properties``, as some write them, keys with an object are names.
    """
    levels = [_Level()]
    choices: tuple[int, int] | None = None  # levels around them, and where they begin
    for found in _JSON.finditer(schema):
        text, level = found[0], levels[-1]
        if text in ("}", "]"):
            yield from levels.pop().loose or ()
            if choices and choices[0] == len(levels):
                yield choices[1], found.end()
                choices = None
        elif text[-1] == ":":
            level.key = text[:-1].rstrip()
            level.place = (found.start() + 1, found.start() + len(level.key))
            if level.of == _PROPERTIES and not choices:
                yield level.place
            continue
        else:
            key = "" if level.of in _MAPS or choices else level.key
            if text in ("{", "["):
                listed = key in _CHOICES or (key == _TYPE and text == "[")
                choices = (len(levels), found.start()) if listed else choices
                if level.loose is not None and text == "{":
                    level.loose.append(level.place)
                    level.loose = None if key == _PROPERTIES else level.loose
                levels.append(_Level(key, [] if key in _PARAMETERS and not choices else None))
                continue
            is_spelled = key in _CHOICES or (key == _TYPE and text not in _UNSPELLED)
            if is_spelled or (key == '"name"' and text[0] == '"'):
                quoted = text[0] == '"'
                yield found.start() + quoted, found.end() - (quoted and key == _TYPE)
        levels[-1].key = ""


@dataclass
class _Level:
    """An open object or list of JSON, or the whole."""

    of: str = ""  # the key of a schema whose value it is, as written
    loose: list[Place] | None = None  # keys with an object: names unless ``properties`` comes
    key: str = ""  # whose value comes next, as written
    place: Place = (0, 0)  # of the key
