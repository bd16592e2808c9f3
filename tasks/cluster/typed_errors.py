"""Typed errors as plain data, so that they come back from a worker with all of their parts."""

from __future__ import annotations

from typing import Final

from umim_core import errors
from umim_core.errors import UmimError

_KINDS: Final = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, UmimError)
}


def as_data(error: UmimError) -> dict[str, object]:
    """Return an error as JSON types."""
    value = {} if error.value is None else {"value": str(error.value)}
    parts = {"rule": error.rule, "remedy": error.remedy, **value}
    return {"error": type(error).__name__, "parts": parts}


def from_data(data: dict[str, object]) -> UmimError:
    """Return the error that `as_data` wrote."""
    return _KINDS[str(data["error"])](**data["parts"])
