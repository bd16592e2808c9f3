"""Lengths of texts in tokens of the byte tokenizer."""

from __future__ import annotations

from tests.evaluation.conftest import byte_tokenizer
from umim_core.text.token_ids import encode

TOKENIZER = byte_tokenizer()


def count(text: str) -> int:
    return len(encode(TOKENIZER, text))
