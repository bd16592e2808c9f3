"""Prompts as texts or chats, and generated text piece by piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers import TextStreamer

from umim_core.backbone import Backbone
from umim_core.errors import GenerationError
from umim_core.merging.state import GenerationState

Chat = Sequence[Mapping[str, Any]]
PromptInput = str | Chat | Sequence[str] | Sequence[Chat]


def encode_prompts(
    prompts: PromptInput,
    backbone: Backbone,
    past: GenerationState | None,
    add_special_tokens: bool | None = None,
) -> list[NDArray[np.int64]]:
    """Return the raw ids of texts and chats.

    Args:
        prompts: One text or chat, or several. A text that continues ``past`` is only what is added;
            a chat is the whole conversation, of which the past is left out here.
        backbone: Its tokenizer encodes them; its chat template renders chats.
        past: The state they continue.
        add_special_tokens: Whether texts get special tokens, a BOS say; None does as the tokenizer
            does by default, and adds none to a text that continues ``past``. Chats never get any:
            their template writes them.

    Raises:
        GenerationError: If a chat has no template or is malformed, or does not begin with the past.
    """
    known = None if past is None else past.raw_ids
    items = _as_list(prompts)
    if known is not None and len(known) != len(items):
        known = None  # the engine says what is wrong
    if add_special_tokens is None and past is not None:
        add_special_tokens = False
    rows = [
        backbone.encode(item, add_special_tokens)
        if isinstance(item, str)
        else backbone.encode(_render(item, backbone, known[b] if known else None))
        for b, item in enumerate(items)
    ]
    return [np.array(ids, dtype=np.int64) for ids in rows]


def _as_list(prompts: PromptInput) -> list[str | Chat]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and isinstance(items[0], Mapping):
        return [cast("Chat", items)]
    return cast("list[str | Chat]", items)


def _render(chat: Chat, backbone: Backbone, past: Sequence[int] | None) -> str:
    tokenizer = backbone.require_tokenizer()
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in chat], add_generation_prompt=True, tokenize=False
        )
    except (ValueError, TypeError, TemplateError) as error:
        raise GenerationError(
            "a chat needs a tokenizer with a chat template, and messages of role and content",
            f"{type(error).__name__}: {str(error)[:200]}",
            "Pass a text, or messages as the template expects them.",
        ) from error
    assert isinstance(text, str)  # noqa: S101  tokenize=False
    if past is None:
        return text
    said = tokenizer.decode(
        list(past), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    if not isinstance(said, str) or not text.startswith(said):
        raise GenerationError(
            "a continued chat must begin with what its state holds",
            f"{text[:60]!r} against {said[:60]!r}",
            "Pass the whole conversation unchanged, or the added text as a string.",
        )
    return text[len(said) :]


class TextPieces(TextStreamer):
    """Collect text as transformers' streamer finds it complete: whole words and lines.

    Args:
        backbone: Its tokenizer decodes.
    """

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(
            backbone.require_tokenizer(),
            skip_prompt=True,
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        self._pieces: list[str] = []

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Keep a piece of text."""
        if text:
            self._pieces.append(text)

    def drain(self) -> list[str]:
        """Return the pieces since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces
