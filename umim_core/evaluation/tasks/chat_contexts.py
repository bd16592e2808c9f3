"""Contexts that a chat template wrote, with the tokens of them that may merge.

lm-eval has the model write a chat and hands the text back as the context of requests. What users
say in it may merge and nothing else, as in ``UMIM.generate``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from lm_eval.utils import warning_once
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from umim_core.rules.matcher import Parts
from umim_core.text.chat_parts import Chat, content_places, encode_parts

_log: Final = logging.getLogger("lm_eval.umim")  # a child of lm-eval's logger


class ChatContexts:
    """Contexts by text.

    Attributes:
        applied: Whether an evaluation writes its contexts by the chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.applied = False
        self._tokenizer = tokenizer
        self._places: dict[str, list[tuple[int, int]]] = {}

    def note(self, chat: Chat, text: str, render: Callable[[Chat], str]) -> None:
        """Note a chat, the text that the template made of it, and how it writes others."""
        self._places[text] = content_places(chat, text, render)

    def parts(self, text: str, ids: Sequence[int] | NDArray[np.int64]) -> Parts | None:
        """Return the tokens of a context that may merge; None for all, where it is no chat."""
        places = self._places.get(text)
        if places is None:
            if self.applied:
                warning_once(
                    _log,
                    "umim: chats that lm-eval cached (--cache_requests) do not say what users "
                    "said: nothing of them merges",
                )
            return () if self.applied else None
        own, ranges = encode_parts(self._tokenizer, text, places)
        end = max((end for _, end in ranges), default=0)
        for front in (0, 1):  # a BOS
            if list(ids[front : front + end]) == own[:end].tolist():
                return tuple((first + front, last + front) for first, last in ranges)
        return ()
