"""Lone surrogates, which a Python string may have and UTF-8 cannot hold."""

from __future__ import annotations


def encoding_error(text: str) -> UnicodeEncodeError | None:
    """Return why a text cannot be written as UTF-8; None if it can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error
    return None
