"""Errors of a stage that is tried again: what failed first stays in sight."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def remembering_the_first_error(function: Callable[[*Ts], T]) -> Callable[[*Ts], T]:
    """Return the function; the error of a later call has a note of the first one's.

    A second try often fails for another reason, such as a core that the first one still holds.
    """
    first: list[BaseException] = []

    @functools.wraps(function)
    def call(*args: *Ts) -> T:
        returned = False
        try:
            result = function(*args)
            returned = True
            return result
        finally:
            error = None if returned else sys.exception()
            if error is not None and first:
                notes = getattr(first[0], "__notes__", [])
                text = f"The first try failed with {type(first[0]).__name__}: {first[0]}"
                error.add_note("\n".join([text, *notes]))
            elif error is not None:
                first.append(error)

    return call
