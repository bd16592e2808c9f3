"""Check of texts for what UTF-8 cannot hold: a Python string may have lone surrogates."""

from __future__ import annotations


def encoding_error(text: str) -> UnicodeEncodeError | None:
    """Return why a text cannot be written as UTF-8; None if it can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error
    return None
