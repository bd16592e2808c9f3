"""Requests as people log them: who wrote which text of a prompt, and what kind of text it is.

A file is JSON Lines or a JSON array of requests in the forms of OpenAI's interfaces, or plain
text; what is wrapped may be JSON in a string::

    {"messages": [{"role": "system", "content": "..."}, ...], "tools": [...]}
    {"request_body": {"messages": ...}, "response_body": {"choices": [{"message": ...}]}}
    {"instructions": "...", "input": [{"role": "user", ...}, ...], "response": {"output": [...]}}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}], "tools": ...}

A row without messages is one text: its field ``text``, a tool's schema, or the row itself, as a
tool would return it. A text file is one text. The pieces of a request stand in the order in which
templates write them: schemas, then messages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from umim_core.encodable import encoding_error
from umim_core.errors import CorpusError, require
from umim_core.rules.matcher import Parts
from umim_core.text.chat_parts import encode_parts
from umim_core.text.documents import CorpusFile, decoded, json_rows
from umim_core.text.json_places import is_json, places_of
from umim_core.text.reading import SourceKind
from umim_core.text.roles import MESSAGE_ROLES
from umim_core.text.roles import Role as MergedRole
from umim_core.text.sources import expand, kind_of
from umim_core.text.token_ids import encode
from umim_core.text.tokens import PIECE_CHARS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Role = MergedRole | Literal["assistant", "text"]
Content = Literal["json", "code", "prose"]
Message = dict[str, Any]
Note = Callable[[str], None]  # tells what is left out of a row
_CODE: Final = frozenset(
    {".c", ".cc", ".cpp", ".cs", ".css", ".go", ".h", ".html", ".java", ".js", ".kt", ".php"}
    | {".py", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift", ".toml", ".ts", ".xml", ".yaml"}
)
_WRAPPED: Final = ("request", "body")  # fields of a log that hold one text, or a request
_SYSTEM: Final = ("system", "instructions")  # fields that hold a system prompt beside messages
_SPEAKERS: Final = {  # of ShareGPT's turns, besides names of roles
    **{"human": "user", "gpt": "assistant", "function_call": "assistant"},
    **{"observation": "tool", "function_response": "tool"},
}
TOOLS_AS_TEXT: Final = "tools written into the system prompt: the model's template knows none"
ROW_AS_RESULT: Final = "row without messages, read whole as a tool's result"
_OF_ITEMS: Final = {"role", "call_id"}  # fields that tell items of a request from other data
_ANSWERS: Final = ("choices", "output")  # fields of a response, in chats and in the newer form
_RESPONSES: Final = ("response", "response_body", "output", "outputs", "completion")
_MESSAGES: Final = (*_RESPONSES, "message")  # fields of a row or a response with one message


@dataclass(frozen=True)
class Piece:
    role: Role
    content: Content
    text: str

    @property
    def has_raw(self) -> bool:
        """Whether some of it stays raw though its role's texts may merge; never of a long text."""
        is_result = self.role == "tool" and self.content == "json"
        return len(self.text) <= PIECE_CHARS and (self.role == "tools" or is_result)

    def encoded(self, tokenizer: PreTrainedTokenizerBase) -> tuple[NDArray[np.int64], Parts]:
        """Return its ids [T], and the tokens that may merge as (first token, end)."""
        if not self.has_raw:
            ids = np.array(encode(tokenizer, self.text), dtype=np.int64)
            return ids, ((0, len(ids)),)
        return encode_parts(tokenizer, self.text, places_of(self.role, self.text))


@dataclass(frozen=True)
class Request:
    place: str  # file and row
    conversation: str  # equal for the turns of one conversation: what it begins with
    prompt: tuple[Piece, ...]
    reply: tuple[Piece, ...] = ()  # where the log holds it: in a response, or the last message
    messages: list[Message] | None = None  # the prompt as templates take it; None of a text
    tools: list[Message] | None = None
    answer: Message | None = None  # the reply as templates take it


@dataclass
class Left:
    """What of a log is not counted, or otherwise: how often, by its reason, and the first place."""

    reasons: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, place: str) -> None:
        self.reasons[reason] += 1
        self.first.setdefault(reason, place)

    def lines(self, before: str = "") -> list[str]:
        """Return what is told of it, without any of the text."""
        return [
            f"{'' if reason in (TOOLS_AS_TEXT, ROW_AS_RESULT) else before}{count:,} x {reason} "
            f"(first: {self.first[reason]})"
            for reason, count in self.reasons.items()
        ]


def read_requests(names: tuple[str, ...], kind: SourceKind | None, left: Left) -> Iterator[Request]:
    """Yield the requests of files, folders and patterns, in the order of their paths.

    ``kind`` is "text" or "jsonl" where endings do not say it. What cannot be counted goes to
    ``left``; no error shows any of the text.
    """
    files = expand(names, kind)
    for file in files:
        found = kind or kind_of(file.location)
        rule = "requests must be JSON Lines, a JSON array or text"
        remedy = "Leave it out, or say what it holds: --kind text or jsonl."
        require(found in ("text", "jsonl"), CorpusError, rule, str(file), remedy)
        if found == "text":
            yield from _text_file(file, left)
            continue
        empty = True
        rows = (inner for place, row in json_rows(file) for inner in _unwrapped(place, row))
        for place, row in rows:
            empty = False
            request = _request(row, place, left)
            if request is not None:
                yield request
        if empty:
            left.add("file without rows", str(file))


def _unwrapped(place: str, row: object) -> Iterator[tuple[str, object]]:
    """Yield the requests that a row holds in a list, an export say; any other row as it is."""
    fields = row if isinstance(row, dict) else {}
    for name, value in fields.items():
        items = value if isinstance(value, list) else []
        requests = any(isinstance(item, dict) and "messages" in item for item in items)
        if requests and not any("messages" in each for _, each in _objects(fields)):
            yield from ((f"{place}, {name} {number}", x) for number, x in enumerate(items, 1))
            return
    yield place, row


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
    note = partial(left.add, place=place)
    if not isinstance(row, dict):
        note("row that is no JSON object")
        return None
    objects = _objects(row)
    bodies = [x for name, x in objects if x is row or name in _WRAPPED or _is_request(x)]
    bodies.sort(key=lambda body: _parsed(body.get("messages")) in ({}, [], ""))
    response = _response(objects)
    chats = (_chat(body, any(response), note) for body in bodies)
    body = next(filter(None, chats), None)
    if body is None:
        text, role = _lone_text(bodies)
        # Items of a tool's result are no items of a response.
        answered = bool(_answers(response, note if role == "text" else lambda _: None))
        if role == "text":
            _note_unread(row, response, answered, note)
        elif answered:
            note("response without its request")
            return None
        elif role == "tool":
            note(ROW_AS_RESULT)
        pieces = _pieces(role, text, note)
        return Request(place, place, tuple(pieces)) if pieces else None
    prompt: list[Piece] = []
    tools: list[Message] = []
    for one in _schemas(body, objects, note):
        if (tool := _object(one)) is None:
            note("tool that is no JSON object")
        elif pieces := _pieces("tools", dumped(tool), note):
            prompt += pieces
            tools.append(tool)
    begin = [{"role": "system", "content": body[name]} for name in _SYSTEM if body.get(name)]
    chat = _messages(_listed(body, "messages", note), note)
    systems = (one["content"] for one, _ in chat if MESSAGE_ROLES[one["role"]] == "system")
    known = next(systems, None)
    chat = [one for one in _messages(begin, note) if one[0]["content"] != known] + chat
    answers = _messages(_answers(response, note), note)
    if not answers and chat and chat[-1][0]["role"] == "assistant":
        answers.append(chat.pop())
    _note_unread(row, response, bool(answers), note)
    for _ in answers[1:]:
        note("reply beside the first one")
    prompt += [piece for _, pieces in chat for piece in pieces]
    if not any(pieces for _, pieces in chat):
        note("request without text")
        return None
    answer, reply = answers[0] if answers else (None, [])
    opening = "".join(piece.text for piece in prompt if piece.role in ("system", "tools"))
    messages = [message for message, _ in chat]
    said = next((message["content"] for message in messages if message["role"] == "user"), "")
    conversation = f"{hash(opening)} {hash(said)}"
    return Request(
        place, conversation, tuple(prompt), tuple(reply), messages, tools or None, answer
    )


def _objects(row: Message) -> list[tuple[str, Message]]:
    """Return the row and the objects in its fields, outer ones first, each with its field."""
    found = [("", row)]
    for _, outer in found:  # grows
        found += [(name, x) for name, value in outer.items() if (x := _object(value)) is not None]
    return found


def _is_request(body: Message) -> bool:
    return any(isinstance(body.get(name), list | str) for name in ("messages", "model"))


def _chat(body: Message, answered: bool, note: Note) -> Message | None:
    """Return a request in the form of chats, of the newer interface, too; None of another row.

    A lone text with a model may be a request for embeddings, too: these have no such answer.
    """
    if body.get("messages") is not None:
        return body
    turns = _parsed(body.get("conversations"))  # a tool's result may have such a field, too
    if isinstance(turns, list) and turns:
        return {**body, "messages": [_turn(x) if isinstance(x, dict) else x for x in turns]}
    said = body.get("input")
    items = _parsed(said)
    asked = isinstance(said, str) and "model" in body and (answered or body.get("instructions"))
    if asked and not isinstance(items, list):
        items = [{"role": "user", "content": said}]
    listed = items if isinstance(items, list) else []
    if not any(isinstance(item, dict) and item.keys() & _OF_ITEMS for item in listed):
        return None
    return {**body, "messages": _of_items(listed, note)}


def _turn(turn: Message) -> Message:
    """Return a turn as ShareGPT has it as a message."""
    speaker = str(turn.get("from"))
    said = "tool_calls" if speaker == "function_call" else "content"  # a call is JSON in its text
    read = {"role": _SPEAKERS.get(speaker, speaker), said: turn.get("value"), **turn}
    return {name: value for name, value in read.items() if name not in ("from", "value")}


def _of_items(items: list[Any], note: Note) -> list[Message]:
    """Return items of the newer interface as messages; calls belong to the reply before them."""
    messages: list[Message] = []
    for item in items:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            messages.append(item)
        elif kind == "function_call":
            function = {name: item[name] for name in ("name", "arguments") if name in item}
            if not messages or messages[-1].get("role") != "assistant":
                messages.append({"role": "assistant", "content": None})
            calls = _listed(messages[-1], "tool_calls", note)
            messages[-1] = {**messages[-1], "tool_calls": [*calls, {"function": function}]}
        elif kind == "function_call_output":
            messages.append({"role": "tool", "content": item.get("output")})
        else:
            note("item that is no message, call or result")
    return messages


def _lone_text(bodies: Sequence[Mapping[str, Any]]) -> tuple[object, Role]:
    for body in bodies:
        for name in ("text", "prompt", "content"):
            if isinstance(body.get(name), str):
                return body[name], "text"
        if "model" in body and isinstance(body.get("prompt") or body.get("input"), list):
            return None, "text"  # ids, or several texts
    return dumped(bodies[0]), "tools" if _is_schema(bodies[0]) else "tool"


def _is_schema(value: object) -> bool:
    return isinstance(value, dict) and (
        "parameters" in value or isinstance(value.get("function"), dict)
    )


def _listed(body: Mapping[str, Any], name: str, note: Note) -> list[Any]:
    """Return a field that holds a list, or one object, perhaps as JSON in a string.

    What else it holds is left out.
    """
    value = _parsed(body.get(name)) or []
    if isinstance(value, list):
        return value
    if isinstance(value, dict):
        return [value]
    note(f"row whose {name} are no list")
    return []


def _schemas(body: Message, objects: list[tuple[str, Message]], note: Note) -> list[Any]:
    """Return the schemas of a request; some logs keep them beside it, among parameters."""
    names = ("tools", "functions")
    own = [x for name in names for x in _listed(body, name, note)]
    beside = (_parsed(other.get(name)) for _, other in objects for name in names)
    lists = (x for x in beside if isinstance(x, list) and any(map(_is_schema, x)))
    return own or next(lists, [])


def _response(objects: list[tuple[str, Message]]) -> list[list[Any]]:
    """Return the choices and the items of the first response: lists of objects.

    Some logs keep the message of an answer alone.
    """
    for _, body in objects:
        lists = (x if isinstance(x, list) else [] for x in map(body.get, _ANSWERS))
        found = [x if any(isinstance(one, dict) for one in x) else [] for x in lists]
        if any(found):
            return found
    alone = (x for name, x in objects if name in _MESSAGES and x.get("role") == "assistant")
    return [[], [x for x in alone if "content" in x or "tool_calls" in x][:1]]


def _note_unread(row: Message, response: list[list[Any]], answered: bool, note: Note) -> None:
    """Tell of a row that holds a response in a form in which its reply is not found."""
    if not answered and (any(response) or any(row.get(name) is not None for name in _RESPONSES)):
        note("response without a message")


def _answers(response: list[list[Any]], note: Note) -> list[Message]:
    """Return the messages that answer a request, where the log holds them as the interface does."""
    choices, items = response
    messages = [choice.get("message") for choice in choices if isinstance(choice, dict)]
    answers = [{**x, "role": "assistant"} for x in messages if isinstance(x, dict)]
    return answers + [x for x in _of_items(items, note) if x.get("role") == "assistant"]


def _messages(messages: Sequence[object], note: Note) -> list[tuple[Message, list[Piece]]]:
    return [read for one in messages if (read := _message(one, note)) is not None]


def _message(message: object, note: Note) -> tuple[Message, list[Piece]] | None:
    """Return a message as templates take it, a text and calls with objects, and its pieces."""
    message = _object(message) or {}
    role = message.get("role")
    if not isinstance(role, str) or role not in MESSAGE_ROLES:
        note("message of an unknown role")
        return None
    content, pieces = message.get("content"), list[Piece]()
    if content is None:
        content = message.get("refusal") or []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else part
        pieces += _pieces(MESSAGE_ROLES[role], text, note)
    read: Message = {name: x for name, x in message.items() if isinstance(x, str)}
    read.pop("tool_calls", None)
    read["content"] = "".join(piece.text for piece in pieces)
    calls = _listed(message, "tool_calls", note)
    if message.get("function_call") is not None:
        calls = [*calls, message["function_call"]]
    known: list[Message] = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            note("call without a function's name")
        elif written := _pieces("assistant", dumped(function), note):
            pieces += written
            if (arguments := _object(function.get("arguments"))) is not None:
                function = {**function, "arguments": arguments}  # templates write it as JSON
            known.append({"type": "function", "function": function})
    if known:
        read["tool_calls"] = known
    return read, pieces


def _pieces(role: Role, text: object, note: Note) -> list[Piece]:
    if not isinstance(text, str):
        note("part that is no text")
    elif encoding_error(text) is not None:
        note("text with lone surrogates")
    elif text:
        return [Piece(role, _content_of(text), text)]
    return []


def dumped(value: object) -> str | None:
    """Return JSON as a model reads it; None for what is nested deeper than can be written."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return None


def _object(value: object) -> Message | None:
    """Return an object, perhaps one that is JSON in a string; None of what is none."""
    value = _parsed(value)
    return value if isinstance(value, dict) else None


def _parsed(value: object) -> object:
    """Return what JSON in a string says; any other value as it is."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _content_of(text: str) -> Content:
    if is_json(text):
        return "json"
    fenced = text.split("```")[1::2]
    return "code" if 2 * sum(map(len, fenced)) > len(text) else "prose"
