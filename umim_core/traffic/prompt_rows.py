"""Logged requests as a model reads them: raw ids, and the parts of them that may merge."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import GenerationError
from umim_core.rules.matcher import Parts
from umim_core.text.chat_parts import encode_parts, render_chat, write_chat
from umim_core.text.roles import Role
from umim_core.text.token_ids import encode
from umim_core.traffic.requests import Left, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
_NO_TOOLS: Final = "tools written into the system prompt: the model's template knows none"


@dataclass(frozen=True)
class PromptRow:
    """A request in ids.

    Attributes:
        conversation: As in ``Request``.
        prompt: Ids of the prompt [T], the beginning of a reply at its end.
        parts: What may merge of it, as (first token, end).
        reply: Ids of the reply, without its end; none where the log holds no reply.
    """

    conversation: str
    prompt: NDArray[np.int64]
    parts: Parts
    reply: NDArray[np.int64]


def prompt_rows(
    requests: Iterable[Request],
    tokenizer: PreTrainedTokenizerBase,
    roles: Sequence[Role],
    left: Left,
) -> Iterator[PromptRow]:
    """Yield requests as the tokenizer's template writes them; ``left`` gets what it cannot write.

    A last message of the assistant is the reply, where the log holds no other.
    """
    for request in requests:
        if request.messages is None:
            ids = np.array(encode(tokenizer, request.prompt[0].text), dtype=np.int64)
            yield PromptRow(request.conversation, ids, ((0, len(ids)),), ids[:0])
            continue
        messages, answer = _readable(request.messages), request.answer
        if answer is None and messages[-1].get("role") == "assistant":
            messages, answer = messages[:-1], messages[-1]
        try:
            try:
                read = _written(messages, answer, request.tools, tokenizer, roles)
            except GenerationError:
                plain = _without_tools(messages, request.tools)
                said = None if answer is None else _without_tools(_readable([answer]), None)[0]
                if (plain, said) == (messages, answer):
                    raise
                read = _written(plain, said, None, tokenizer, roles)
                left.add(_NO_TOOLS, request.place)
        except GenerationError:
            left.add("chat that the model's template cannot write", request.place)
            continue
        yield PromptRow(request.conversation, *read)


def _written(
    messages: list[Message],
    answer: Message | None,
    tools: list[Message] | None,
    tokenizer: PreTrainedTokenizerBase,
    roles: Sequence[Role],
) -> tuple[NDArray[np.int64], Parts, NDArray[np.int64]]:
    written = write_chat(messages, tokenizer, tools, roles)
    ids, parts = encode_parts(tokenizer, written.text, written.places)
    said = "" if answer is None else _reply(messages, answer, tools, tokenizer, written.text)
    return ids, parts, np.array(encode(tokenizer, said), dtype=np.int64)


def _without_tools(messages: list[Message], tools: list[Message] | None) -> list[Message]:
    """Return messages for a template that knows no tools: schemas and calls are JSON in texts."""
    plain: list[Message] = []
    for message in messages:
        calls = [_dumped(call.get("function", call)) for call in message.get("tool_calls") or ()]
        content = message.get("content") or ""
        kept = {name: x for name, x in message.items() if name != "tool_calls"}
        plain.append(
            {**kept, "content": "\n".join(filter(None, [content, *calls]))} if calls else message
        )
    if tools:
        schemas = "\n".join(map(_dumped, tools))
        begin = plain.pop(0)["content"] + "\n" if plain[0].get("role") == "system" else ""
        plain.insert(0, {"role": "system", "content": begin + schemas})
    return plain


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _readable(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose calls have arguments as objects: templates write them as JSON."""
    return [
        {**message, "tool_calls": [_call(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _call(call: Any) -> Any:
    function: object = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments: str = function["arguments"]
    try:
        return {**call, "function": {**function, "arguments": json.loads(arguments)}}
    except ValueError:
        return call


def _reply(
    messages: list[Message],
    answer: Message,
    tools: list[Message] | None,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
) -> str:
    """Return a reply as the template writes it, without what it writes behind every reply."""
    whole = render_chat([*messages, *_readable([answer])], tokenizer, tools)
    ends = [
        render_chat([*messages, {"role": "assistant", "content": text}], tokenizer, tools)
        for text in ("0", "1")
    ]
    pairs = zip(*(reversed(end) for end in ends), strict=False)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    behind = ends[0][len(ends[0]) - same :]
    if not (whole.startswith(prompt) and whole.endswith(behind)):
        raise GenerationError("a template must write replies behind prompts", "another order")
    return whole[len(prompt) : len(whole) - len(behind)]
