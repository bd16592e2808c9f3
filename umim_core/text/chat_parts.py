"""Parts of a chat that may merge: the contents of its users' messages, nothing of the template.

A merged span across the template ("trained by Hugging Face", a role and its line end) turns answers
into nonsense, so the template's own tokens, system prompts and earlier replies stay raw::

    <|im_start|>system  Be brief.<|im_end|>
    <|im_start|>user    Where is the Eiffel Tower?<|im_end|>
                        -------------------------- may merge, but for its raw tail

Every message is cut on its own, so that a growing chat only ever appends units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from umim_core.errors import GenerationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chat = Sequence[Mapping[str, Any]]
MARK: Final = "\ue000{}\ue001"  # stands for a content where the text around it is looked for
_RAW_ROLES: Final = ("system", "developer", "assistant")


def content_places(chat: Chat, text: str, render: Callable[[Chat], str]) -> list[tuple[int, int]]:
    """Return where the contents that may merge stand in a rendered chat (characters, end excluded).

    Returns:
        One entry per content, in order; none where the template rewrites contents.
    """
    marked = [
        {**message, "content": MARK.format(number)}
        if isinstance(message.get("content"), str)
        else message
        for number, message in enumerate(chat)
    ]
    written, rest, borders = render(marked), [], [0]
    for number, message in enumerate(chat):
        mark = MARK.format(number)
        at = written.find(mark)
        if at >= 0 and isinstance(message.get("content"), str):
            rest.append((number, at, at + len(mark)))
    borders = [0, *(place for _, start, end in rest for place in (start, end)), len(written)]
    between = [written[a:b] for a, b in list(pairwise(borders))[::2]]
    places, at = [], len(between[0])
    if not text.startswith(between[0]):
        return []
    for (number, _, _), behind in zip(rest, between[1:], strict=True):
        content = str(chat[number]["content"])
        shown = [c for c in (content, content.strip()) if text.startswith(c + behind, at)]
        if not shown:
            return []
        end = at + len(shown[0])
        if chat[number].get("role") not in _RAW_ROLES:
            places.append((at, end))
        at = end + len(behind)
    return places


def token_ranges(
    offsets: Sequence[tuple[int, int]] | NDArray[np.int64], places: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """Return the tokens that lie within some places of a text, as (first token, end).

    Places and the characters of each token, ``offsets`` [T, 2], are without their ends.
    """
    characters: NDArray[np.int64] = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    ranges = []
    for start, end in places:
        inside = np.flatnonzero((characters[:, 0] >= start) & (characters[:, 1] <= end))
        if len(inside):
            ranges.append((int(inside[0]), int(inside[-1]) + 1))
    return tuple(ranges)


def encode_parts(
    tokenizer: PreTrainedTokenizerBase, text: str, places: Sequence[tuple[int, int]]
) -> tuple[NDArray[np.int64], tuple[tuple[int, int], ...]]:
    """Encode a text of a chat, with the tokens that lie within some of its characters.

    Returns:
        Raw ids [T] (int64), and the tokens that may merge, as :func:`token_ranges`.
    """
    if not tokenizer.is_fast:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.array(ids, dtype=np.int64), ()
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ranges = token_ranges(encoded["offset_mapping"], places)
    return np.array(encoded["input_ids"], dtype=np.int64), ranges


def render_chat(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> str:
    """Write a conversation by a tokenizer's template, the beginning of a reply behind it."""
    if tokenizer.chat_template is None:
        raise GenerationError(
            "a chat needs a tokenizer with a chat template",
            "one without",
            "Pass a text, or set tokenizer.chat_template.",
        )
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
