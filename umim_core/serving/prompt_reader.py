"""Prompts of requests as ids: one long text never holds the others.

A text that cannot fit the context is refused before it is encoded; of other long ones one is
encoded at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np
from starlette.concurrency import run_in_threadpool
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from umim_core.errors import ContextLengthError, require
from umim_core.rules.matcher import PromptIds
from umim_core.serving.openai_api import ChatPrompt
from umim_core.serving.tool_calls import Calls
from umim_core.text.chat_parts import encode_parts, write_chat
from umim_core.text.roles import USER, Role
from umim_core.text.template_process import as_json
from umim_core.text.token_ids import encode

_LONG: Final = 1 << 16  # characters
Result = TypeVar("Result")


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
    """Reads prompts by a tokenizer; threads may share it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, roles: Sequence[Role] = USER) -> None:
        self._tokenizer, self._roles = tokenizer, roles
        self._lanes = Lanes()
        self._longest: int | None = None  # bytes of a token
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            core = tokenizer.backend_tokenizer
            core.no_truncation()  # else the first calls change it, each for all threads
            core.no_padding()
            if core.normalizer is None:  # others may make texts shorter
                self._longest = max(len(token.encode()) for token in core.get_vocab())

    async def read(
        self,
        prompt: str | list[int] | ChatPrompt,
        most_tokens: int | None,
        calls: Calls | None = None,
    ) -> PromptIds:
        """Return a prompt that may have so many raw tokens, a chat with the tools it may call.

        A text gets the special tokens that the tokenizer adds. Ids are checked by the engine.
        """
        if isinstance(prompt, ChatPrompt):
            texts = (part.text for message in prompt.messages for part in message.content)
            size = 64 * len(prompt.messages) + sum(map(len, texts))
            size += len(as_json(calls.tools)) if calls else 0
        else:
            size = len(prompt)
        return await self._lanes.run(size, lambda: self._read(prompt, most_tokens, calls))

    def _read(
        self, prompt: str | list[int] | ChatPrompt, most: int | None, calls: Calls | None
    ) -> PromptIds:
        ranges, unmerged = None, ""
        if isinstance(prompt, str):
            self._check_text(prompt, most)
            ids = np.array(encode(self._tokenizer, prompt, None), dtype=np.int64)
        elif isinstance(prompt, list):
            _check_count(len(prompt), most)
            ids = np.array(prompt)
        else:
            chat = [message.plain() for message in prompt.messages]
            roles = self._roles if prompt.roles is None else prompt.roles
            written = write_chat(chat, self._tokenizer, calls.tools if calls else None, roles)
            text = written.text + (calls.begun if calls else "")
            self._check_text(text, most)
            ids, ranges = encode_parts(self._tokenizer, text, written.places)
            unmerged = written.unmerged
        _check_count(len(ids), most)
        return PromptIds(ids, ranges, unmerged)

    def _check_text(self, text: str, most: int | None) -> None:
        if most is not None and self._longest is not None:
            _check_count(-(-len(text.encode("utf-8", "surrogatepass")) // self._longest), most)


def _check_count(count: int, most: int | None) -> None:
    """Refuse a prompt that does not fit, however it merges."""
    rule = f"a prompt must fit the model's positions, of at most {most} raw tokens"
    fits = most is None or count <= most
    require(fits, ContextLengthError, rule, f"{count} or more", "Shorten it.")
