"""Parts of a chat that may merge: contents of some roles and schemas of tools, never the template.

A merged span across the template ("trained by Hugging Face", a role and its line end) turns answers
into nonsense, so the template's own tokens and earlier replies, calls of tools among them, stay
raw; ``roles`` says of the rest whose may merge::

    <|im_start|>system  Be brief.  {"name": "find", ...}<|im_end|>
                        ---------  --------------------             system, tools
    <|im_start|>user    Where is the Eiffel Tower?<|im_end|>
                        --------------------------                  user, each but for its raw tail

Every content and schema is cut on its own, so that a growing chat only ever appends units.

Where contents stand is found by writing the chat a second time with marks around them. Marks stand
inside of white space at the edges, which templates trim, so that both renderings are equal but for
the marks, whatever the template does with replies::

    text    <user>Hi there<end><assistant>        marked  <user>[0[Hi there]0]<end><assistant>

Schemas begin and end with keys that nothing else has instead, and are found where a template wrote
them as JSON. Not all of them may merge, nor all of a result (``json_places``).
"""

from __future__ import annotations

import json
import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from umim_core.encodable import encoding_error
from umim_core.errors import GenerationError, require
from umim_core.progress import warn_once
from umim_core.text.json_places import Place, places_of
from umim_core.text.roles import MESSAGE_ROLES, USER, Role
from umim_core.text.template_process import (
    Chat,
    Tools,
    WriterEndedError,
    as_json,
    rendered,
    template_of,
)
from umim_core.text.token_ids import encode, typed_panics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Render = Callable[[Chat, Tools | None], str]
_log: Final = logging.getLogger("umim")
_REWRITTEN: Final = "its template changes what users say"
_SCHEMAS: Final = "its template does not write tools as JSON"


@dataclass(frozen=True)
class WrittenChat:
    """A chat as its template writes it."""

    text: str  # the beginning of a reply behind it
    places: list[Place]  # where contents stand that may merge, in order
    end: int | None  # where the content of the last message ends, if that is known
    unmerged: str  # why contents of these roles stay raw; "" where all may merge
    chat: Chat = field(compare=False, repr=False)  # the form in which the template read it

    def followed_by(self, reply: Mapping[str, Any]) -> Chat:
        """Return the chat with a reply behind it, of the same form."""
        in_parts = any(isinstance(message.get("content"), list) for message in self.chat)
        content = (_in_parts if in_parts else _joined)(reply["content"])
        return [*self.chat, {**reply, "content": content}]


def write_chat(
    chat: Chat,
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools | None = None,
    roles: Sequence[Role] = USER,
) -> WrittenChat:
    """Write a chat by a tokenizer's template, and find what may merge in it.

    Contents are texts or lists of parts, whichever the template reads: a template that loops over
    parts drops a text without a word. So do many with a developer: they read a system prompt.
    """
    for message in cast("Sequence[object]", chat):
        content = message.get("content") if isinstance(message, Mapping) else message
        require(
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and isinstance(content, str | list | None)
            # A template would write others as Python shows them, or drop them without a word.
            and (not isinstance(content, list) or all(map(_is_text, content))),
            GenerationError,
            "a chat is a list of messages with a role, and with a text or a list of parts of text",
            "other parts" if isinstance(content, list) else type(content).__name__,
            'Pass [{"role": "user", "content": "..."}].',
        )
    listed: object = tools
    is_list = isinstance(listed, list | tuple) and {isinstance(x, dict) for x in listed} == {True}
    rule = "tools must be a list of schemas, JSON objects"
    found = "an empty list" if listed == [] else type(listed).__name__
    remedy = 'Pass [{"type": "function", "function": {"name": ...}}], or none.'
    require(listed is None or is_list, GenerationError, rule, found, remedy)
    template = template_of(tokenizer, tools)

    def render(chat: Chat, tools: Tools | None) -> str:
        return rendered(template, chat, tokenizer, tools)

    refused: list[GenerationError] = []
    for form in _forms(chat):
        marks = _Marks(form, tools, roles)
        try:
            marked = render(marks.chat, marks.tools)
            marks.check(marked)
        except WriterEndedError:
            raise
        except GenerationError as error:
            refused.append(error)
            continue
        plain = marks.chat == form and marks.tools == tools
        text = marked if plain else render(form, tools)
        _check_read(render, form, None if marks.show_tools(marked) else tools, tools, text)
        return marks.find(marked, text)
    raise refused[0]


def _forms(chat: Chat) -> list[list[Mapping[str, Any]]]:
    """Return a chat as it is, with texts and with parts for contents, then with common roles."""
    texts, parts = (
        [m if m.get("content") is None else {**m, "content": form(m["content"])} for m in chat]
        for form in (_joined, _in_parts)
    )
    forms = [texts, parts] if texts == list(chat) else [list(chat), texts, parts]
    common: list[list[Mapping[str, Any]]] = [
        [{**m, "role": MESSAGE_ROLES.get(m["role"], m["role"])} for m in form] for form in forms
    ]
    return forms + [new for new, form in zip(common, forms, strict=True) if new != form]


def _check_read(
    render: Render, chat: Chat, unseen: Tools | None, tools: Tools | None, text: str
) -> None:
    """Refuse a template that writes the same text without tools that were not seen, or calls."""
    without: dict[str, tuple[Chat, Tools | None]] = {}
    if unseen:
        without["tools"] = chat, None
    if any(message.get("tool_calls") for message in chat):
        kept = [{k: v for k, v in m.items() if k != "tool_calls"} for m in chat]
        without["calls of tools"] = kept, tools
    for what, (less, fewer) in without.items():
        try:
            same = render(less, fewer) == text
        except GenerationError:  # a reply of calls alone has no content
            same = False
        rule = f"a chat's template must write its {what}"
        remedy = "Leave them out, or use a model whose template reads them."
        require(not same, GenerationError, rule, "the same text without them", remedy)


def content_places(
    chat: Chat,
    text: str,
    render: Render,
    tools: Tools | None = None,
    roles: Sequence[Role] = USER,
) -> list[Place]:
    """Return the places that may merge in a chat that ``render`` wrote with its tools.

    Raises a ``GenerationError`` where the template drops what a user says.
    """
    marks = _Marks(list(chat), tools, roles)
    marked = render(marks.chat, marks.tools)
    marks.check(marked)
    return marks.find(marked, text).places


def _joined(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _in_parts(content: str | list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


class _Marks:
    """A chat with marks around the contents that must not get lost, and how to find them.

    ``chat`` are its messages with marks, ``tools`` its tools, with keys where they may merge.
    """

    def __init__(
        self, chat: list[Mapping[str, Any]], tools: Tools | None, roles: Sequence[Role]
    ) -> None:
        # No text of the chat holds it, and no filter changes it: digits are their own upper case.
        spoken, self._key = as_json([chat, tools]), "7310"
        self._chat, self._roles = chat, frozenset[str](roles)
        while self._key in spoken:
            self._key += "7"
        # By number: whose it is, the text or schema to find, whether it is of the last message.
        self._cores: dict[str, tuple[str, object, bool]] = {}
        self.tools = tools
        if tools and "tools" in roles:
            self.tools = [self._keyed(tool, number) for number, tool in enumerate(tools)]
        self._written: dict[str, str] = {}  # roles as the chat has them
        self.chat = [self._marked(message, message is chat[-1]) for message in chat]

    def _marked(self, message: Mapping[str, Any], is_last: bool) -> Mapping[str, Any]:
        content = message.get("content")
        written = str(message.get("role"))
        if MESSAGE_ROLES.get(written) == "assistant":
            return message
        if isinstance(content, str):
            return {**message, "content": self._around(content, written, is_last)}
        if not isinstance(content, list):
            return message
        parts = [
            # A template that prints a part instead of reading it prints the key, too.
            {**part, "text": self._around(part["text"], written, is_last), f"{self._key}!": ""}
            if _is_text(part)
            else part
            for part in content
        ]
        return {**message, "content": parts}

    def _around(self, text: str, role: str, is_last: bool) -> str:
        core = text.strip()
        if not core:
            return text
        at, number = text.index(core), str(len(self._cores))
        # What no common name is known of counts as a user's.
        self._cores[number] = MESSAGE_ROLES.get(role, "user"), core, is_last
        self._written[number] = role
        mark = f"{self._key}.{number}."
        return f"{text[:at]}{mark}({core}{mark}){text[at + len(core) :]}"

    def _keyed(self, tool: Mapping[str, Any], number: int) -> Mapping[str, Any]:
        """Return a tool that begins and ends with keys, and so does its function."""
        schemas = {f"t{number}": tool}
        keyed = dict(tool)
        if isinstance(tool.get("function"), Mapping):  # some templates write that alone
            schemas[f"f{number}"] = tool["function"]
            keyed["function"] = self._between_keys(tool["function"], f"f{number}")
        for name, schema in schemas.items():
            self._cores[name] = "tools", json.loads(as_json(schema)), False
        return self._between_keys(keyed, f"t{number}")

    def _between_keys(self, schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        return {f"{self._key}{name}(": 0, **schema, f"{self._key}{name})": 0}

    def show_tools(self, marked: str) -> bool:
        """Return whether tools are seen to be read, because a template wrote their keys."""
        return re.search(rf"{self._key}[tf]\d", marked) is not None

    def check(self, marked: str) -> None:
        """Refuse a template that drops what a user or the system says, or prints parts."""
        seen = set(re.findall(rf"{self._key}\.(\d+)\.[()]", marked))
        dropped = [role for number, role in self._written.items() if number not in seen]
        rule = "a chat's template must write what its messages say"
        found = f"nothing of a message of role {dropped[0]!r}" if dropped else "a list of parts"
        remedy = (
            "Leave that message out, or use a template that reads it: contents are given as texts "
            "and as lists of parts."
        )
        require(not dropped and f"{self._key}!" not in marked, GenerationError, rule, found, remedy)

    def find(self, marked: str, text: str) -> WrittenChat:
        """Return where contents stand in a text, given the rendering with marks."""
        key = self._key
        # Keys of schemas become marks; those of a function do not where all of its tool is written.
        marked = re.sub(rf'(\{{\s*)"{key}([tf]\d+)\(":\s*0,\s*', rf"{key}.\2.(\1", marked)
        marked = re.sub(rf',\s*"{key}([tf]\d+)\)":\s*0(\s*\}})', rf"\g<2>{key}.\1.)", marked)
        tools = set(re.findall(rf"{key}\.t(\d+)\.", marked))
        marked = re.sub(
            rf"{key}\.f(\d+)\.[()]", lambda found: "" if found[1] in tools else found[0], marked
        )
        pieces = re.split(rf"{key}\.([tf]?\d+)\.([()])", marked)  # piece, number, side, piece
        places, at, end = list[Place](), 0, None
        raw = {(number.strip("tf"), role) for number, (role, _, _) in self._cores.items()}
        moved = _moves("".join(pieces[::3]), text)
        for k in range(0, len(pieces) - 1, 3):
            piece, number, side, inside = pieces[k : k + 4]
            at += len(piece)
            role, core, is_last = self._cores.get(number, ("", "", False))
            if side == ")":
                end = moved(at, at) if is_last else end
            elif role in self._roles and pieces[k + 4 : k + 6] == [number, ")"]:
                start = moved(at, at + len(inside))
                if start is not None and _says(inside, core):
                    places += places_of(role, inside, start)
                    raw.discard((number.strip("tf"), role))
        lost = {role for _, role in raw if role in self._roles}
        unmerged = _REWRITTEN if lost - {"tools"} else _SCHEMAS if lost else ""
        if unmerged:
            log_unmerged(unmerged)
        return WrittenChat(text, places, end, unmerged, self._chat)


def _says(text: str, core: object) -> bool:
    """Return whether a text is a content, or is a schema as JSON."""
    if isinstance(core, str):
        return text == core
    with suppress(ValueError, RecursionError):
        return bool(json.loads(text) == core)
    return False


def _moves(source: str, target: str) -> Callable[[int, int], int | None]:
    """Return what gives the start of a place in a text that begins and ends as the source does.

    It gives None where they differ: where a template looks into contents, at first letters say.
    """
    if source == target:
        return lambda start, stop: start
    sizes = range(1, min(len(source), len(target)) + 1)  # by halves: texts may have megabytes
    begin = bisect_left(sizes, True, key=lambda n: not target.startswith(source[:n]))
    end = bisect_left(sizes, True, key=lambda n: not target.endswith(source[-n:]))

    def moved(start: int, stop: int) -> int | None:
        if stop <= begin:
            return start
        return start - len(source) + len(target) if start >= len(source) - end else None

    return moved


def log_unmerged(reason: str) -> None:
    """Say once why something stays raw; what users say is never logged."""
    warn_once(_log, f"umim: part of a chat stays raw: {reason}")


def token_ranges(
    offsets: Sequence[tuple[int, int]] | NDArray[np.int64], places: Sequence[Place]
) -> tuple[Place, ...]:
    """Return the tokens that lie within some places of a text, as (first token, end).

    Places, in order, and the characters of each token, ``offsets`` [T, 2], are without their ends.
    """
    characters: NDArray[np.int64] = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    bounds: NDArray[np.int64] = np.asarray(places, dtype=np.int64).reshape(-1, 2)
    # Tokens follow each other, but for special ones of no character.
    first = np.searchsorted(np.maximum.accumulate(characters[:, 0]), bounds[:, 0], side="left")
    end = np.searchsorted(np.maximum.accumulate(characters[:, 1]), bounds[:, 1], side="right")
    return tuple((int(a), int(b)) for a, b in zip(first, end, strict=True) if a < b)


def encode_parts(
    tokenizer: PreTrainedTokenizerBase, text: str, places: Sequence[Place]
) -> tuple[NDArray[np.int64], tuple[Place, ...]]:
    """Return raw ids [T] of a text of a chat, and the tokens that may merge (`token_ranges`)."""
    rule, found = "a chat must hold no lone surrogates", encoding_error(text)
    remedy = "Decode the text that it comes from as UTF-8 or UTF-16."
    require(found is None, GenerationError, rule, found, remedy)
    if not tokenizer.is_fast:
        if places:
            log_unmerged("the tokenizer does not say which characters its tokens are")
        return np.array(encode(tokenizer, text), dtype=np.int64), ()
    with typed_panics():
        encoded = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
    ranges = token_ranges(encoded["offset_mapping"], places)
    return np.array(encoded["input_ids"], dtype=np.int64), ranges
