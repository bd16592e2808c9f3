"""Rows of benchmark pages that a result file does not hold as such: ratios, labels, selections.

``ROWS`` has a function for each benchmark whose template needs more than the file's own fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tasks.report.render import Report, walk
from umim_core.config.form import ModuleForm

PART_LABELS: Final = {
    "": "all parts together",
    "_part_general": "general English",
    "_part_wikitext2": "WikiText-2",
    "_part_docstrings": "docstrings",
}
_MOST_CHARACTERS: Final = 80  # of an answer


def _distill_step(report: Report) -> Report:
    losses = [row | {"what": "loss"} for row in walk(report, "losses.*name.sides.*side")]
    steps = [row | {"what": "step"} for row in walk(report, "step.precisions.*name.*side")]
    return {"steps": losses + steps}


def _answers(report: Report) -> Report:
    """Add the sides of every list of questions, and the answers that lost their key word."""
    sides, lost = [], []
    for asked in walk(report, "lists.*list"):
        for side, figures in asked["sides"].items():
            sides.append(
                figures | {"side": side, "list": asked["list"], "accepted": asked["accepted"]}
            )
        for row in asked["rows"]:
            base = row["sides"]["base"]
            for side, answer in row["sides"].items():
                if base["accepted"] and not answer["accepted"]:
                    texts = {"answer": _short(answer["answer"]), "base": _short(base["answer"])}
                    lost.append({"question": row["id"], "side": side} | texts)
    return {"sides": sides, "lost": lost}


def _short(text: str) -> str:
    """Return the beginning of an answer on one line."""
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 1]}…"


def shipped_parts(report: Report) -> Report:
    """Add the parts of a shipped model's corpus by name, and its form and recommendation."""
    form = report["module"]["form"]
    parts = []
    for name, part in report["corpus"].items():
        digests = [
            pair
            for split, of in part["files"].items()
            for pair in (of.items() if isinstance(of, Mapping) else [("", of)])
        ]
        parts.append(part | {"part": part_label(f"_part_{name}"), "digests": digests})
    return {
        "parts": parts,
        "deviations": ModuleForm.model_validate(form | {"positions": "none"}).deviations(),
        "recommended": report.get("recommended", {"merge": "all", "raw_tail": 0}),
    }


def part_label(suffix: str) -> str:
    """Return the name of a test text for people, from the suffix of its numbers."""
    return PART_LABELS.get(suffix, suffix.removeprefix("_part_"))


ROWS: Final[dict[str, Callable[[Report], Report]]] = {
    "distill_step": _distill_step,
    "answers": _answers,
    "shipped_model": shipped_parts,
}
