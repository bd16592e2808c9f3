r"""Final answers of worked solutions: the last ``\boxed{...}``, else the last number."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from umim_core.evaluation.text_metrics.pass_at_k import PASS_FIGURES, pass_figures
from umim_core.evaluation.text_metrics.text_metric import add_text_metric

_BOX: Final = "\\boxed{"
_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_FORMAT: Final = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\{([^{}]*)\}|\\[,;! ]|\\left|\\right")


@add_text_metric("math_answer", *PASS_FIGURES)
def math_answer(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    """Return pass@k: an answer is right if its final answer equals a reference's.

    Numbers are compared by value (``1,000`` is ``1000.0``), all else by its characters without
    blanks and LaTeX's formatting.
    """
    wanted = {final_answer(reference) for reference in row["references"]} - {None}
    return pass_figures([final_answer(text) in wanted for text in texts])


def final_answer(text: str) -> str | None:
    r"""Return the final answer of a worked solution in one form; None if it has none.

    ::

        "... so $x = \boxed{1{,}024}$."    "1024"
        "They pay 3 * 6 = $18.00 ."         "18"
        "I do not know"                     None
    """
    boxed = _last_boxed(text)
    if boxed is not None:
        plain = _FORMAT.sub(lambda found: found[1] or "", boxed).replace("{,}", ",")
        plain = "".join(plain.replace("$", "").split())
        return _number(plain) or plain or None
    numbers = _NUMBER.findall(text)
    return _number(numbers[-1]) if numbers else None


def _last_boxed(text: str) -> str | None:
    """Return what stands in the last box that is closed; None without one."""
    start = text.rfind(_BOX)
    while start >= 0:
        depth = 0
        for end in range(start + len(_BOX) - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[start + len(_BOX) : end]
        start = text.rfind(_BOX, 0, start)
    return None


def _number(text: str) -> str | None:
    """Return a number without grouping, surplus zeros and sign of plus; None for other text."""
    if not _NUMBER.fullmatch(text.removeprefix("+")):
        return None
    try:
        value = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
    return format(value.normalize() + 0, "f")
