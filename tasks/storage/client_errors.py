"""Errors by which object storage and its clients refuse, as far as their packages are installed."""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Final

_OF_CLIENTS: Final = {
    "aiohttp": ("ClientError",),
    "azure.core.exceptions": ("AzureError",),
    "boto3.exceptions": ("Boto3Error",),
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "gcsfs.retry": ("HttpError",),
    "google.auth.exceptions": ("GoogleAuthError",),
}


@functools.cache
def refusals() -> tuple[type[Exception], ...]:
    """Return the errors by which storage refuses; those of its clients are no OSError."""
    kinds: list[type[Exception]] = [OSError]
    for module, names in _OF_CLIENTS.items():
        with contextlib.suppress(ImportError):
            client = importlib.import_module(module)
            kinds += [getattr(client, name) for name in names]
    return tuple(kinds)
