"""Check of texts for what UTF-8 cannot hold: a Python string may have lone surrogates."""

from __future__ import annotations

from umim_core.errors import CorpusError


def encoding_error(text: str) -> UnicodeEncodeError | None:
    """Return why a text cannot be written as UTF-8; None if it can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error
    return None


def check_encodable(text: str) -> None:
    """Refuse a text with a lone surrogate: no tokenizer takes it, and none says why."""
    if not text.isascii() and (error := encoding_error(text)) is not None:
        raise CorpusError(
            "text must not hold lone surrogates",
            f"{text[error.start]!a} at character {error.start}",
            "Correct it: half of a character of two was cut off.",
        ) from error
