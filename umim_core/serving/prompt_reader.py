"""Prompts of requests as ids: one long text never holds the others.

Tokenizers let several threads encode at once, outside of Python's lock, once their settings stay as
they are. A text that cannot fit the context is refused before it is encoded; of other long ones one
is encoded at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.concurrency import run_in_threadpool
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from umim_core.errors import GenerationError
from umim_core.rules.grams import ORDERS
from umim_core.text.chat_parts import encode_parts, write_chat
from umim_core.text.token_ids import encode

_LONG: Final = 1 << 16  # characters
Result = TypeVar("Result")


class ReadPrompt(NamedTuple):
    """Raw ids [T] of a prompt; of a chat the ranges that may merge, and why others stay raw."""

    ids: NDArray[np.int64]
    ranges: tuple[tuple[int, int], ...] | None = None
    left_raw: str = ""


class Lanes:
    """Work of requests in threads, of which one at a time is long."""

    def __init__(self) -> None:
        self._one_long = asyncio.Semaphore()

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        if size <= _LONG:
            return await run_in_threadpool(work)
        async with self._one_long:
            return await run_in_threadpool(work)


class PromptReader:
    """Reads texts and chats by a tokenizer; threads may share it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._lanes = Lanes()
        self._longest: int | None = None  # bytes of a token
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            core = tokenizer.backend_tokenizer
            core.no_truncation()  # else the first calls change it, each for all threads
            core.no_padding()
            if core.normalizer is None:  # others may make texts shorter
                self._longest = max(len(token.encode()) for token in core.get_vocab())

    async def text(self, text: str, most_tokens: int | None) -> ReadPrompt:
        """Return the ids of a text, with the special tokens that the tokenizer adds."""
        self._check(text, most_tokens)
        return await self._lanes.run(len(text), lambda: self._text(text, most_tokens))

    def _text(self, text: str, most_tokens: int | None) -> ReadPrompt:
        ids = np.array(encode(self._tokenizer, text, None), dtype=np.int64)
        check_tokens(len(ids), most_tokens)
        return ReadPrompt(ids)

    async def chat(self, messages: Sequence[dict[str, str]], most_tokens: int | None) -> ReadPrompt:
        size = sum(len(message["content"]) + 64 for message in messages)
        return await self._lanes.run(size, lambda: self._chat(messages, most_tokens))

    def _chat(self, messages: Sequence[dict[str, str]], most_tokens: int | None) -> ReadPrompt:
        written = write_chat(messages, self._tokenizer)
        self._check(written.text, most_tokens)
        ids, ranges = encode_parts(self._tokenizer, written.text, written.places)
        check_tokens(len(ids), most_tokens)
        return ReadPrompt(ids, ranges, written.unmerged)

    def _check(self, text: str, most_tokens: int | None) -> None:
        if most_tokens is not None and self._longest is not None:
            size = len(text.encode("utf-8", "surrogatepass"))
            check_tokens(-(-size // self._longest), most_tokens)


def most_raw_tokens(positions: int | None, merged: bool) -> int | None:
    """Return how many raw tokens may fit a context; each unit holds up to four if they merge."""
    return None if positions is None else positions * (ORDERS[-1] if merged else 1)


def check_tokens(count: int, most: int | None) -> None:
    """Refuse a prompt that does not fit, however it merges."""
    if most is not None and count > most:
        raise GenerationError(
            f"a prompt must fit the model's positions, of at most {most} raw tokens",
            f"{count} or more",
            "Shorten it.",
        )
