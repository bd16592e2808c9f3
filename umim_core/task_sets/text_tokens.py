"""Lengths of texts in a backbone's tokens."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TextTokens:
    """Token counts of a tokenizer, without special tokens."""

    tokenizer: PreTrainedTokenizerBase

    def count(self, text: str) -> int:
        """Return the tokens of a text."""
        encoded = self.tokenizer(text, add_special_tokens=False, verbose=False)
        return len(encoded["input_ids"])
