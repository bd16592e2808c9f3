"""Logged requests as a model reads them: raw ids, and the parts of them that may merge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import GenerationError
from umim_core.rules.matcher import Parts
from umim_core.text.chat_parts import encode_parts, write_chat
from umim_core.text.roles import MESSAGE_ROLES, Role
from umim_core.text.template_process import render_chat
from umim_core.text.token_ids import encode
from umim_core.text.tokens import PIECE_CHARS, tokenize_parts
from umim_core.traffic.requests import Left, Message, Request, dumped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Written = tuple[NDArray[np.int64], Parts, NDArray[np.int64]]
_NO_TOOLS: Final = "tools written into the system prompt: the model's template knows none"


@dataclass(frozen=True)
class PromptRow:
    place: str
    conversation: str
    prompt: NDArray[np.int64]  # [T], the beginning of a reply at its end
    parts: Parts  # what may merge of it, as (first token, end)
    reply: NDArray[np.int64]  # without its end; empty where the log holds none


def prompt_rows(
    requests: Iterable[Request],
    tokenizer: PreTrainedTokenizerBase,
    roles: Sequence[Role],
    left: Left,
    most: int | None = None,
    answer: int = 0,
) -> Iterator[PromptRow]:
    """Yield requests as the tokenizer's template writes them; ``left`` gets what it cannot.

    Those go there, too, that have more than ``most`` tokens with a reply, which has at least
    ``answer``. They are not tokenized whole: a megabyte takes 150 of memory.
    """
    for request in requests:
        read: _Written | None = None
        if request.messages is None:
            if _fits((piece := request.prompt[0]).text, tokenizer, most):
                ids, parts = piece.encoded(tokenizer)
                read = ids, parts, ids[:0]
        else:
            try:
                read = _either(request.messages, request, tokenizer, roles, left, most)
            except GenerationError:
                left.add("chat that the model's template cannot write", request.place)
                continue
        if read is None or (most is not None and len(read[0]) + max(len(read[2]), answer) > most):
            left.add("request that does not fit the model's context", request.place)
        elif len(read[0]):
            yield PromptRow(request.place, request.conversation, *read)
        else:
            left.add("request without tokens", request.place)


def _fits(text: str, tokenizer: PreTrainedTokenizerBase, most: int | None) -> bool:
    """Return whether a text may have at most ``most`` tokens; a long one is read up to those."""
    if most is None or len(text) <= PIECE_CHARS:
        return True
    sizes = accumulate(len(ids) for ids, _ in tokenize_parts([(text, True)], tokenizer))
    return all(size <= most for size in sizes)


def _either(
    messages: list[Message],
    request: Request,
    tokenizer: PreTrainedTokenizerBase,
    roles: Sequence[Role],
    left: Left,
    most: int | None,
) -> _Written | None:
    """Write a chat as it is, with common names of its roles, or with its tools as texts.

    A template that knows no developer or no tools refuses these, or drops them.
    """
    answer = request.answer
    named = [{**message, "role": MESSAGE_ROLES[message["role"]]} for message in messages]
    plain = _without_tools(named, request.tools), answer and _without_tools([answer], None)[0]
    forms = [(messages, answer, request.tools), (named, answer, request.tools), (*plain, None)]
    refused: list[GenerationError] = []
    for number, form in enumerate(forms):
        if form in forms[:number]:
            continue
        try:
            written = _written(*form, tokenizer, roles, most)
        except GenerationError as error:
            refused.append(error)
            continue
        if number == len(forms) - 1:
            left.add(_NO_TOOLS, request.place)
        return written
    raise refused[0]


def _written(
    messages: list[Message],
    answer: Message | None,
    tools: list[Message] | None,
    tokenizer: PreTrainedTokenizerBase,
    roles: Sequence[Role],
    most: int | None,
) -> _Written | None:
    written = write_chat(messages, tokenizer, tools, roles)
    said = "" if answer is None else _reply(messages, answer, tools, tokenizer, written.text)
    if not all(_fits(text, tokenizer, most) for text in (written.text, said)):
        return None
    ids, parts = encode_parts(tokenizer, written.text, written.places)
    return ids, parts, np.array(encode(tokenizer, said), dtype=np.int64)


def _without_tools(messages: list[Message], tools: list[Message] | None) -> list[Message]:
    """Return messages for a template that knows no tools: schemas and calls are JSON in texts."""
    plain: list[Message] = []
    for message in messages:
        calls = [dumped(call["function"]) for call in message.get("tool_calls", ())]
        kept = {name: x for name, x in message.items() if name != "tool_calls"}
        plain.append({**kept, "content": "\n".join(filter(None, [message["content"], *calls]))})
    if tools:
        schemas = "\n".join(filter(None, map(dumped, tools)))
        begin = plain.pop(0)["content"] + "\n" if plain[0]["role"] == "system" else ""
        plain.insert(0, {"role": "system", "content": begin + schemas})
    return plain


def _reply(
    messages: list[Message],
    answer: Message,
    tools: list[Message] | None,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
) -> str:
    """Return a reply as the template writes it, without what it writes behind every reply."""
    whole = render_chat([*messages, answer], tokenizer, tools)
    if answer.get("tool_calls"):
        fewer = {name: x for name, x in answer.items() if name != "tool_calls"}
        if render_chat([*messages, fewer], tokenizer, tools) == whole:
            raise GenerationError("a template must write a reply's calls", "the same without them")
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
