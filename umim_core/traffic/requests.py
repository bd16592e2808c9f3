"""Requests as people log them: who wrote which text of a prompt, and what kind of text it is.

A file is JSON Lines or a JSON array of requests in the form of OpenAI's interface, or plain text::

    {"messages": [{"role": "system", "content": "..."}, ...], "tools": [...]}
    {"request" or "body": {"messages": ...}, "response": {"choices": [{"message": ...}]}}

A row without messages is one text: its field ``text``, a tool's schema, or the row itself, as a
tool would return it. A text file is one text. The pieces of a request stand in the order in which
templates write them: schemas, then messages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from umim_core.encodable import encoding_error
from umim_core.errors import CorpusError, require
from umim_core.text.files import CorpusFile, SourceKind, expand, kind_of
from umim_core.text.sources import decoded, json_rows

Role = Literal["tools", "system", "user", "tool", "assistant", "text"]
Content = Literal["json", "code", "prose"]
ROLES: Final[dict[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "tool": "tool",
    "function": "tool",
    "assistant": "assistant",
}
_CODE: Final = frozenset(
    {".c", ".cc", ".cpp", ".cs", ".css", ".go", ".h", ".html", ".java", ".js", ".kt", ".php"}
    | {".py", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift", ".toml", ".ts", ".xml", ".yaml"}
)
_WRAPPED: Final = ("request", "body")  # fields of a log that hold a request


@dataclass(frozen=True)
class Piece:
    """One text of a request."""

    role: Role
    content: Content
    text: str


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        place: File and row.
        conversation: Equal for the turns of one conversation: what it begins with.
        prompt: What the model reads.
        reply: What it wrote, where the log holds it.
        messages: The prompt as templates take it, and ``tools``; None of a text.
        answer: The reply, likewise.
    """

    place: str
    conversation: str
    prompt: tuple[Piece, ...]
    reply: tuple[Piece, ...] = ()
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    answer: dict[str, Any] | None = None


@dataclass
class Left:
    """What of a log is not counted: how often, by its reason, and the place of the first."""

    reasons: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, place: str) -> None:
        self.reasons[reason] += 1
        self.first.setdefault(reason, place)


def read_requests(names: tuple[str, ...], kind: SourceKind | None, left: Left) -> Iterator[Request]:
    """Yield the requests of files, folders and patterns, in the order of their paths.

    ``kind`` is "text" or "jsonl" where endings do not say it. What cannot be counted goes to
    ``left``; no error shows any of the text.
    """
    files = expand(names, kind)
    for file in files:
        found = kind or kind_of(file.location)
        require(
            found in ("text", "jsonl"),
            CorpusError,
            "requests must be JSON Lines, a JSON array or text",
            str(file),
            "Leave it out, or say what it holds: --kind text or jsonl.",
        )
        if found == "text":
            yield from _text_file(file, left)
            continue
        try:
            for place, row in json_rows(file):
                request = _request(row, place, left)
                if request is not None:
                    yield request
        except CorpusError as error:  # its value may be text
            raise CorpusError(error.rule, "text that is not shown", error.remedy) from None


def _text_file(file: CorpusFile, left: Left) -> Iterator[Request]:
    with file.open_unpacked() as stream:
        text = "".join(decoded(file, stream))
    ending = file.location.lower().rpartition(".")[2]
    content: Content = "code" if f".{ending}" in _CODE else _content_of(text)
    if text:
        yield Request(str(file), str(file), (Piece("text", content, text),))
    else:
        left.add("file without text", str(file))


def _request(row: object, place: str, left: Left) -> Request | None:
    if not isinstance(row, dict):
        left.add("row that is no JSON object", place)
        return None
    body = next((row[n] for n in _WRAPPED if isinstance(row.get(n), dict)), row)
    messages = body.get("messages")
    if messages is None:
        text, role = _lone_text(row)
        pieces = _pieces(role, text, place, left)
        return Request(place, place, pieces) if pieces else None
    if not isinstance(messages, list):
        left.add("row whose messages are no list", place)
        return None
    prompt: list[Piece] = []
    tools = body.get("tools") or body.get("functions") or []
    for tool in tools if isinstance(tools, list) else [tools]:
        prompt += _pieces("tools", _dumped(tool), place, left)
    for message in messages:
        prompt += _message(message, place, left)
    answer = _reply_of(row)
    reply = () if answer is None else _message(answer, place, left)
    if not prompt:
        left.add("request without text", place)
        return None
    said = next((p.text for p in prompt if p.role == "user"), "")
    begin = "".join(piece.text for piece in prompt if piece.role in ("system", "tools"))
    return Request(
        place,
        f"{hash(begin)} {hash(said)}",
        tuple(prompt),
        reply,
        messages,
        tools if isinstance(tools, list) and tools else None,
        answer,
    )


def _lone_text(row: Mapping[str, Any]) -> tuple[object, Role]:
    for name in ("text", "prompt", "content"):
        if isinstance(row.get(name), str):
            return row[name], "text"
    is_schema = "parameters" in row or isinstance(row.get("function"), dict)
    return _dumped(row), "tools" if is_schema else "tool"


def _reply_of(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the message that answers a request, where the log holds it as the interface does."""
    response = row.get("response")
    if isinstance(response, dict) and isinstance(response.get("body"), dict):
        response = response["body"]
    choices = response.get("choices") if isinstance(response, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    return message if isinstance(message, dict) else None


def _message(message: object, place: str, left: Left) -> tuple[Piece, ...]:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(role, str) or role not in ROLES:
        left.add("message of an unknown role", place)
        return ()
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    pieces: list[Piece] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if text is not None or isinstance(part, dict):
            pieces += _pieces(ROLES[role], text, place, left)
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        pieces += _pieces("assistant", _dumped(function or call), place, left)
    return tuple(pieces)


def _pieces(role: Role, text: object, place: str, left: Left) -> tuple[Piece, ...]:
    if not isinstance(text, str):
        left.add("part that is no text", place)
    elif encoding_error(text) is not None:
        left.add("text with lone surrogates", place)
    elif text:
        return (Piece(role, _content_of(text), text),)
    return ()


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _content_of(text: str) -> Content:
    begin = text.lstrip()[:1]
    if begin and begin in "{[":
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            return "json"
    fenced = text.split("```")[1::2]
    return "code" if 2 * sum(map(len, fenced)) > len(text) else "prose"
