"""Multiple-choice questions and their files: one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umim_core.encodable import encoding_error
from umim_core.errors import CorpusError


def read_objects(path: str | Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Read the objects of a JSON Lines file; blank lines are skipped.

    Returns:
        Tuples of place ("<file>:<line>"), line number from 1, and object.

    Raises:
        CorpusError: If the file cannot be read, or a line is no JSON object; the message names
            file and line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(
            f"the data file {path} must be readable UTF-8", str(error), "Check the path."
        ) from error
    # split("\n"), not splitlines(): a JSON string may hold U+2028, which is no line break here.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            place = f"{path}:{number}"
            yield place, number, _object(line, place)


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # no JSON; endless numbers; too many brackets
        raise CorpusError(
            f"{place} must be one JSON object", str(error), "Correct the line."
        ) from error
    if not isinstance(value, dict):
        raise CorpusError(f"{place} must be one JSON object", value, "Correct the line.")
    return value


@dataclass(frozen=True)
class Question:
    """One multiple-choice question.

    Raises:
        CorpusError: If a text is blank or no Unicode text, or the index points at no choice.
    """

    context: str
    choices: tuple[str, ...]
    gold: int
    id: str = ""

    def __post_init__(self) -> None:
        for text in (self.context, *self.choices, self.id):
            if (error := encoding_error(text)) is not None:
                raise CorpusError(
                    "a question must be text that UTF-8 can hold", str(error), "Correct it."
                ) from error
        if not self.context.strip():
            raise CorpusError("a question's context must hold text", self.context, "Fill it in.")
        if len(self.choices) < 2 or not all(choice.strip() for choice in self.choices):
            raise CorpusError(
                "a question needs at least two choices with text", self.choices, "Add the missing."
            )
        if not 0 <= self.gold < len(self.choices):
            raise CorpusError(
                f"gold must be an index into {len(self.choices)} choices, counted from 0",
                self.gold,
                "Correct the index.",
            )


def read_questions(path: str | Path) -> list[Question]:
    """Read questions from JSON lines ``{"context": str, "choices": [str], "gold": int}``.

    An ``id`` (text) is kept, other keys are ignored; blank lines are skipped.

    Raises:
        CorpusError: If the file cannot be read or a line breaks the schema; the message names
            file and line.
    """
    questions = [_question(row, place) for place, _, row in read_objects(path)]
    if not questions:
        raise CorpusError(f"the question file {path} must hold questions", "none", "Fill it.")
    return questions


def _question(row: Mapping[str, Any], where: str) -> Question:
    context, choices, gold = row.get("context"), row.get("choices"), row.get("gold")
    name = row.get("id")
    if (
        not isinstance(context, str)
        or not isinstance(choices, list)
        or not all(isinstance(choice, str) for choice in choices)
        or not isinstance(gold, int)
        or isinstance(gold, bool)
    ):
        raise CorpusError(
            f"{where} must hold context (string), choices (list of strings) and gold (integer)",
            row,
            "Correct the line.",
        )
    try:
        return Question(context, tuple(choices), gold, name if isinstance(name, str) else "")
    except CorpusError as error:
        raise CorpusError(f"{where}: {error.rule}", error.value, error.remedy) from error
