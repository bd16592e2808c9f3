"""Lone surrogates, which a Python string may have and UTF-8 cannot hold."""

from __future__ import annotations


def encoding_error(text: str) -> str | None:
    """Return which lone surrogate keeps a text from being written as UTF-8; None if none does."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{text[error.start]!a} at character {error.start}"
    return None
