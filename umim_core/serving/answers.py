"""Answers in OpenAI's form, whole or as server-sent events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

DONE: Final = b"data: [DONE]\n\n"


def event(document: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def usage(*, raw: int, merged: int, generated: int, cached: int) -> dict[str, Any]:
    """Return the count of tokens; the model holds the merged units, some cached already."""
    return {
        "prompt_tokens": merged,
        "completion_tokens": generated,
        "total_tokens": merged + generated,
        "umim": {"raw_prompt_tokens": raw, "merged_prompt_tokens": merged},
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@dataclass(frozen=True)
class Choice:
    """One answer, or what a stream adds to it; it goes on if ``finish`` is None."""

    index: int
    text: str
    finish: str | None = None
    logprobs: Any = None


class Answer:
    """The documents of one answer, a chat's or a completion's."""

    def __init__(self, chat: bool, model: str) -> None:
        self._chat, self._begun = chat, set[int]()
        self._head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[Choice], count: dict[str, Any] | None) -> dict[str, Any]:
        """Return the answer as one document."""
        kind = "chat.completion" if self._chat else "text_completion"
        return self._document(kind, choices, self._content, count)

    def _content(self, choice: Choice) -> dict[str, Any]:
        if not self._chat:
            return {"text": choice.text}
        return {"message": {"role": "assistant", "content": choice.text, "refusal": None}}

    def chunk(
        self, choices: Sequence[Choice], count: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return a document of a stream."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return self._document(kind, choices, self._delta, count)

    def _document(
        self,
        kind: str,
        choices: Sequence[Choice],
        text_of: Callable[[Choice], dict[str, Any]],
        count: dict[str, Any] | None,
    ) -> dict[str, Any]:
        shown = [
            {
                "index": choice.index,
                **text_of(choice),
                "logprobs": choice.logprobs,
                "finish_reason": choice.finish,
            }
            for choice in choices
        ]
        document = {**self._head, "object": kind, "choices": shown}
        return document if count is None else {**document, "usage": count}

    def _delta(self, choice: Choice) -> dict[str, Any]:
        if not self._chat:
            return {"text": choice.text}
        first = choice.index not in self._begun
        self._begun.add(choice.index)
        delta = {"role": "assistant"} if first else {}
        return {"delta": {**delta, "content": choice.text} if choice.text or first else delta}
