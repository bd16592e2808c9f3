"""Chats as raw ids, with or without their past, and generated text piece by piece."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers import TextStreamer

from umim_core.backbone.backbone import Backbone
from umim_core.errors import GenerationError
from umim_core.inference.state import GenerationState
from umim_core.model.inputs import Chat, Item

_REPLY: Final = "\ue000{}\ue001"  # stands for a reply where the text around it is looked for


def encode_prompts(
    items: Sequence[Item],
    backbone: Backbone,
    past: GenerationState | None,
    add_special_tokens: bool | None = None,
) -> list[NDArray[np.integer]]:
    """Return the raw ids of prompts.

    Args:
        items: Texts, chats and ids. What continues ``past`` is only what is added; but a chat is
            the whole conversation, of which the past is left out here.
        backbone: Its tokenizer encodes them; its chat template renders chats.
        past: The state they continue.
        add_special_tokens: Whether texts get special tokens, a BOS say; None does as the tokenizer
            does by default, and adds none to a text that continues ``past``. Chats never get any:
            their template writes them.

    Raises:
        GenerationError: If a chat has no template or is malformed, or does not begin with the past.
    """
    known = None if past is None else past.raw_ids
    if known is not None and len(known) != len(items):
        known = None  # the engine says what is wrong
    if add_special_tokens is None and past is not None:
        add_special_tokens = False
    rows: list[NDArray[np.integer]] = []
    for b, item in enumerate(items):
        if isinstance(item, np.ndarray):
            rows.append(item)
            continue
        if isinstance(item, str):
            ids = backbone.encode(item, add_special_tokens)
        else:
            text = _render(item, backbone)
            ids = backbone.encode(_added(item, text, known[b], backbone) if known else text)
        rows.append(np.array(ids, dtype=np.int64))
    return rows


def _render(chat: Chat, backbone: Backbone) -> str:
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
    return text


def _added(chat: Chat, text: str, past: Sequence[int], backbone: Backbone) -> str:
    """Return what a conversation adds to its past.

    Many templates trim the replies that they write; the past holds them as they were generated. So
    white space at the edges of replies (and next to special tokens) may differ, and nothing else::

        past    user: Hi<end>assistant:  Sure.
        text    user: Hi<end>assistant: Sure.<end>user: And?<end>assistant:
        added                                <end>user: And?<end>assistant:

    Args:
        chat: The whole conversation.
        text: The same as its template writes it.
        past: Raw ids of the past.
        backbone: Its tokenizer reads them.
    """
    said = _decode(past, backbone)
    if text.startswith(said):
        return text[len(said) :]
    # Some decoders put spaces behind special tokens: let both go through them.
    whole = _decode(backbone.encode(text), backbone)
    rest = _behind(said, whole, _solid_parts(chat, backbone))
    if rest is None:
        raise GenerationError(
            "a continued chat must begin with what its state holds",
            f"{text[:60]!r} against {said[:60]!r}",
            "Pass the whole conversation unchanged (its template must write replies as they were "
            "generated, but for white space around them), or the added text as a string.",
        )
    return rest


def _decode(ids: Sequence[int], backbone: Backbone) -> str:
    text = backbone.require_tokenizer().decode(
        list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text if isinstance(text, str) else "".join(text)


def _solid_parts(chat: Chat, backbone: Backbone) -> list[str]:
    """Return a conversation as the template writes it, in parts without white space at their edges.

    Parts end at the edges of replies and at special tokens, where some tokenizers add spaces.
    """
    replies = [
        number
        for number, message in enumerate(chat)
        if message.get("role") == "assistant" and isinstance(message.get("content"), str)
    ]
    marked = [dict(message) for message in chat]
    for number in replies:
        marked[number]["content"] = _REPLY.format(number)
    rest = _decode(backbone.encode(_render(marked, backbone)), backbone)
    parts: list[str] = []
    for number in replies:
        before, _, rest = rest.partition(_REPLY.format(number))
        parts += [before, chat[number]["content"]]
    special = backbone.require_tokenizer().all_special_tokens
    cut = re.compile("(" + "|".join(map(re.escape, special)) + ")") if special else None
    pieces = [piece for part in [*parts, rest] for piece in (cut.split(part) if cut else [part])]
    return [piece.strip() for piece in pieces if piece.strip()]


def _behind(said: str, text: str, parts: Sequence[str]) -> str | None:
    """Return what of a text stands behind what was said; None if it does not begin with that."""
    at = place = 0  # in said, in text
    for part in parts:
        if not said[at:].strip():
            break
        at += _blank(said[at:])
        place += _blank(text[place:])
        left = said[at:].rstrip()
        shared = left if part.startswith(left) else part
        if not (text.startswith(part, place) and left.startswith(shared)):
            return None
        at, place = at + len(shared), place + len(shared)
    if said[at:].strip():
        return None
    written = text[place : place + _blank(text[place:])]
    both = takewhile(lambda pair: pair[0] == pair[1], zip(said[at:], written, strict=False))
    return text[place + len(list(both)) :]


def _blank(text: str) -> int:
    """Return how many characters of white space a text begins with."""
    return len(text) - len(text.lstrip())


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
