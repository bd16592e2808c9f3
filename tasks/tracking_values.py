"""Turn configurations and errors into what may be written to a tracking server."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeVar

T = TypeVar("T")
_SECRET_NAME: Final = re.compile(
    r"(^|[._-])(token|auth|password|passwd|secret|api_?key|credentials?)$", re.IGNORECASE
)
_CREDENTIALS: Final = re.compile(r"//[^/@\s]+@")
_NOT_IN_NAMES: Final = re.compile(r"[^\w\-. /:]")
_MAX_VALUE_CHARS: Final = 500
HIDDEN: Final = "***"


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Flatten nested configuration to dotted names and short text values.

    Args:
        values: JSON-like values; None and empty containers are kept as text.
        prefix: Put before every name.

    Returns:
        ``{"distill.steps": "60", "taus": "[5, 50]"}``. Values of names such as ``api_key`` are
        hidden; longer ones are cut (the stage's manifest holds them whole).
    """
    flat: dict[str, str] = {}
    for name, value in values.items():
        full = _NOT_IN_NAMES.sub("_", f"{prefix}{name}")
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{full}.")
            continue
        text = HIDDEN if _SECRET_NAME.search(full) else str(value)
        flat[full] = text if len(text) <= _MAX_VALUE_CHARS else text[:_MAX_VALUE_CHARS] + "..."
    return flat


def redact(text: str) -> str:
    """Remove user names and passwords from the addresses in a text.

    ``http://me:pw@host/x`` becomes ``http://***@host/x``.
    """
    return _CREDENTIALS.sub(f"//{HIDDEN}@", text)


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Cut a sequence into pieces of at most ``size``."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
