"""Values fit for a tracking store: parameters of configurations, texts of errors, no secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeVar
from urllib.parse import quote

from umim_core.addresses import scrubbed
from umim_core.errors import TrackingError

T = TypeVar("T")
Curve = Sequence[tuple[int, float]]
Kind = Literal["pipeline", "stage", "comparison", "harness"]
Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]
_KEY: Final = re.compile(r"^[\w.:\-]+$")
_SECRET_NAME: Final = re.compile(
    r"(^|[._-])(token|auth|password|passwd|secret|api_?key|credentials?)$", re.IGNORECASE
)
_NOT_IN_NAMES: Final = re.compile(r"[^\w\-. /:]")
_MAX_VALUE_CHARS: Final = 500
HIDDEN: Final = "***"


@dataclass(frozen=True)
class RunInput:
    """A data set that a run read."""

    name: str
    digest: str
    source: str
    context: str = "training"


@dataclass(frozen=True)
class StoredRun:
    """A run as the store knows it: its id, status and start time (milliseconds)."""

    run_id: str
    status: str
    start_time_ms: int


def require_key(key: str) -> str:
    """Return the key of a run if a query can hold it."""
    if not _KEY.match(key):
        raise TrackingError("a run key must be letters, digits and . : _ -", key)
    return key


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Flatten nested configuration to dotted names and short text values.

    Returns:
        ``{"distill.steps": "60", "taus": "[5, 50]"}``. Values of names such as ``api_key`` are
        hidden, user names and passwords in addresses, too; long values are cut (the stage's
        manifest holds them whole).
    """
    flat: dict[str, str] = {}
    for name, value in values.items():
        full = fit_name(f"{prefix}{name}")
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{full}.")
            continue
        text = HIDDEN if _SECRET_NAME.search(full) else scrubbed(str(value))
        flat[full] = text if len(text) <= _MAX_VALUE_CHARS else text[:_MAX_VALUE_CHARS] + "..."
    return flat


def fit_name(name: str) -> str:
    """Return a name with the signs alone that the store takes: ``pass@1`` is ``pass_at_1``."""
    return _NOT_IN_NAMES.sub("_", name.replace("@", "_at_"))


def sqlite_address(file: Path) -> str:
    """Return the address of a database file as SQLAlchemy reads it: ``a?b`` is ``a%3Fb``."""
    return f"sqlite:///{quote(str(file), safe='/ ')}"


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Cut a sequence into pieces of at most ``size``."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
