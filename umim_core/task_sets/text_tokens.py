"""Lengths of texts in a backbone's tokens, and texts cut to a length at their middle."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from umim_core.errors import BackboneError


class TextTokens:
    """Token counts of a tokenizer, without special tokens.

    Args:
        tokenizer: A fast tokenizer: it knows which characters a token stands for.

    Raises:
        BackboneError: If it does not.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise BackboneError(
                "a tokenizer that measures prompts must know the characters of its tokens",
                type(tokenizer).__name__,
                "Take the backbone's fast tokenizer (tokenizer.json).",
            )
        self._tokenizer = tokenizer

    def count(self, text: str) -> int:
        """Return the tokens of a text."""
        encoded = self._tokenizer(text, add_special_tokens=False, verbose=False)
        return len(encoded["input_ids"])

    def keep_ends(self, text: str, most: int) -> str:
        """Cut tokens out of a text's middle.

        Args:
            text: The text.
            most: Tokens to keep, at least 0: half of them at the beginning, the others at the end.

        Returns:
            The text itself if it has no more tokens; else both ends with a line break between them,
            which together can have a few tokens more or less where the cut tears a word.

        Source: LongBench (Bai et al., 2024), which cuts long inputs at their middle.
        """
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        places = encoded["offset_mapping"]
        if len(places) <= most:
            return text
        head, tail = most // 2, most - most // 2
        begin = text[: places[head - 1][1]] if head else ""
        end = text[places[-tail][0] :] if tail else ""
        return f"{begin}\n{end}"
