"""Logged requests as a model reads them: raw ids, and the parts of them that may merge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import GenerationError
from umim_core.rules.matcher import Parts
from umim_core.text.chat_parts import WrittenChat, encode_parts, write_chat
from umim_core.text.roles import MESSAGE_ROLES, Role
from umim_core.text.template_process import render_chat
from umim_core.text.token_ids import encode
from umim_core.text.tokens import PIECE_CHARS, tokenize_parts
from umim_core.traffic.requests import TOOLS_AS_TEXT, Left, Message, Request, dumped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Written = tuple[NDArray[np.int64], Parts, NDArray[np.int64]]


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
        try:
            read = _read(request, tokenizer, roles, left, most)
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


def _read(
    request: Request,
    tokenizer: PreTrainedTokenizerBase,
    roles: Sequence[Role],
    left: Left,
    most: int | None,
) -> _Written | None:
    """Return a text's ids, or a chat's as the template writes it; None of one that is too long.

    Tools are texts where a template refuses or drops them.
    """
    messages, answer = request.messages, request.answer
    if messages is None:
        piece = request.prompt[0]
        if not _fits(piece.text, tokenizer, most):
            return None
        ids, parts = piece.encoded(tokenizer)
        return ids, parts, ids[:0]

    def encoded(
        messages: list[Message], answer: Message | None, tools: list[Message] | None
    ) -> _Written | None:
        written = write_chat(messages, tokenizer, tools, roles)
        said = "" if answer is None else _reply(written, answer, tools, tokenizer)
        if not all(_fits(text, tokenizer, most) for text in (written.text, said)):
            return None
        ids, parts = encode_parts(tokenizer, written.text, written.places)
        return ids, parts, np.array(encode(tokenizer, said), dtype=np.int64)

    try:
        return encoded(messages, answer, request.tools)
    except GenerationError:
        plain = _without_tools(messages, request.tools)
        replied = None if answer is None else _without_tools([answer], None)[0]
        if (plain, replied) == (messages, answer):
            raise
        row = encoded(plain, replied, None)
    left.add(TOOLS_AS_TEXT, request.place)
    return row


def _without_tools(messages: list[Message], tools: list[Message] | None) -> list[Message]:
    """Return messages for a template that knows no tools: schemas and calls are JSON in texts."""
    plain: list[Message] = []
    for message in messages:
        calls = [dumped(call["function"]) for call in message.get("tool_calls", ())]
        kept = {name: x for name, x in message.items() if name != "tool_calls"}
        plain.append({**kept, "content": "\n".join(filter(None, [message["content"], *calls]))})
    if tools:
        schemas = "\n".join(filter(None, map(dumped, tools)))
        is_system = MESSAGE_ROLES[plain[0]["role"]] == "system"
        begin = plain.pop(0)["content"] + "\n" if is_system else ""
        plain.insert(0, {"role": "system", "content": begin + schemas})
    return plain


def _reply(
    written: WrittenChat,
    answer: Message,
    tools: list[Message] | None,
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """Return a reply as the template writes it, without what it writes behind every reply."""

    def behind(reply: Message) -> str:
        return render_chat(written.followed_by(reply), tokenizer, tools)

    whole = behind(answer)
    if answer.get("tool_calls"):
        fewer = {name: x for name, x in answer.items() if name != "tool_calls"}
        if behind(fewer) == whole:
            raise GenerationError("a template must write a reply's calls", "the same without them")
    ends = [behind({"role": "assistant", "content": text}) for text in ("0", "1")]
    pairs = zip(*(reversed(end) for end in ends), strict=False)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    end = ends[0][len(ends[0]) - same :]
    if not (whole.startswith(written.text) and whole.endswith(end)):
        raise GenerationError("a template must write replies behind prompts", "another order")
    return whole[len(written.text) : len(whole) - len(end)]
