"""Texts as raw ids, with or without the special tokens that a tokenizer adds."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool | None = False
) -> list[int]:
    """Tokenize a text.

    Args:
        tokenizer: The tokenizer.
        text: Any text.
        add_special_tokens: Whether to add special tokens, a BOS say; None does as the tokenizer
            does by default.
    """
    chosen = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
    return list(tokenizer(text, verbose=False, **chosen)["input_ids"])


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Turn raw ids into text, special tokens left out, spaces as they are."""
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text if isinstance(text, str) else "".join(text)


def leading_ids(
    tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool | None = None
) -> list[int]:
    """Return the special ids that a tokenizer puts before a text by default, a BOS say.

    A worked example: where "a" becomes ``<s> a </s>`` by default, ``[<s>]``.

    Args:
        tokenizer: The tokenizer.
        add_special_tokens: As in ``encode``.
    """
    bare, whole = encode(tokenizer, "a"), encode(tokenizer, "a", add_special_tokens)
    starts = [k for k in range(len(whole)) if whole[k : k + len(bare)] == bare]
    return whole[: starts[0]] if starts else []
