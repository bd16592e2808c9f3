r"""Calls of tools in what a model writes, as OpenAI's interface says them.

    reply    Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>
    content  "Let me see."       tool_calls  f, '{"x": 1}'

Templates of Qwen and Hermes teach these marks; a reply that is JSON of calls alone counts, too, as
small models (Qwen 2.5 Coder) leave them out. What is no call of a tool that the request offers
stays content.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import from_json
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from umim_core.serving.openai_api import ChatPrompt, bad_field
from umim_core.text.template_process import template_for
from umim_core.text.text_stream import begun

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FENCE, _FENCE_END = "```json", "```"
_BARE: Final = re.compile(rf"\{{|\[\s*\{{|{_FENCE}")  # what a reply of calls alone begins with
_LIST: Final = re.compile(r"\[\s*")  # with nothing behind it: may become one
_OTHER: Final = "<function="  # XML within the marks, of Qwen 3 Coder
_MOST: Final = 1 << 16  # characters of a call


def call_marks(tokenizer: PreTrainedTokenizerBase) -> frozenset[str] | None:
    """Return the marks that are special tokens, which must be shown to find calls.

    None where the chat template teaches other marks, or none.
    """
    chat = template_for(tokenizer, with_tools=True)
    if not chat or _OPEN not in chat or _CLOSE not in chat or _OTHER in chat:
        return None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return frozenset()
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    return frozenset({_OPEN, _CLOSE} & {token.content for token in added if token.special})


@dataclass(frozen=True)
class Calls:
    marks: frozenset[str]  # as ``call_marks`` says
    tools: list[dict[str, Any]]
    begun: str  # what replies begin with, written behind the prompt: a call that must come
    single: bool  # whether a reply has one call at most

    @classmethod
    def of(cls, asked: ChatPrompt, marks: frozenset[str] | None) -> Calls | None:
        """Return what a request says of calls; None where there are to be none."""
        choice = asked.tool_choice
        named = choice.function.name if choice.function else None
        tools = [tool.model_dump(exclude_unset=True) for tool in asked.tools]  # as they came
        must = choice.type in ("required", "function")
        if not tools or choice.type == "none":
            if must:
                raise bad_field("tool_choice", "tool_choice needs tools", "none", "Add tools.")
            return None
        if marks is None:
            rule = f"tools need a model whose template says that it calls them in {_OPEN} and JSON"
            remedy = "Leave them out, or serve another model."
            raise bad_field("tools", rule, "another one", remedy)
        names = {tool["function"]["name"] for tool in tools}
        if choice.type == "function" and named not in names:
            rule, remedy = "tool_choice must name one of the tools", "Name one, or leave it out."
            raise bad_field("tool_choice", rule, named, remedy)
        begun = _OPEN + '\n{"name": "' if must else ""
        if named is not None:
            begun += json.dumps(named, ensure_ascii=False)[1:] + ', "arguments":'
        return cls(marks, tools, begun, not asked.parallel_tool_calls)


class Reply:
    """One reply as it comes; what is no call of ``asked``, or with None all of it, is its text."""

    def __init__(self, asked: Calls | None) -> None:
        self.text, self.calls = "", list[dict[str, Any]]()  # so far; calls that are whole
        self.finish: str | None = None  # why it ended
        self._asked, self._held = asked, asked.begun if asked else ""
        self._bare: bool | None = None  # whether the reply may be JSON alone; None: not known yet
        self._searched = 0  # characters of the text held that have no closing mark

    def add(self, piece: str, finish: str | None, end: bool) -> tuple[str, list[dict[str, Any]]]:
        """Add a piece; return the text and the calls that are certain now."""
        told = len(self.calls)
        text = piece if self._asked is None else self._read(piece, end, self._asked)
        self.text += text
        self.finish = "tool_calls" if self.calls and finish == "stop" else finish
        return text, self.calls[told:]

    def _read(self, piece: str, end: bool, asked: Calls) -> str:
        """Return what is certain to be text, and keep calls that are whole now."""
        self._held += piece
        start = self._held.lstrip()
        may_be = _FENCE.startswith(start) or _LIST.fullmatch(start)
        if self._bare is None and (end or not may_be):
            self._bare = _BARE.match(start) is not None
        if self._bare is not False and len(self._held) <= _MOST:
            if not end:
                return ""
            alone = [
                one if isinstance(one, dict) and "arguments" in one else None
                for one in _values(start)
            ]
            if self._tell(alone, asked):
                self._held = ""
                return ""
        self._bare = False
        content = ""
        while self._held:
            at = self._held.find(_OPEN)
            if at < 0:
                size = len(self._held)
                if not end:  # white space goes with a mark
                    size = len(self._held[: size - begun(self._held, _OPEN)].rstrip())
                content += self._held[:size]
                self._held = self._held[size:]
                break
            close = self._held.find(_CLOSE, max(at, self._searched - len(_CLOSE)))
            if close < 0 and not end and len(self._held) - at <= _MOST:
                self._searched = len(self._held)
                break
            last = len(self._held) if close < 0 else close
            first = at + len(_OPEN)
            is_call = self._tell(_values(self._held[first:last]), asked)
            size = min(last + len(_CLOSE), len(self._held))
            again = self._held.find(_OPEN, first, last)
            if not is_call and again >= 0:  # the mark before was quoted, or its call not closed
                is_call = self._tell(_values(self._held[first:again]), asked)
                size = len(self._held[:again].rstrip())
            content += self._held[:at].rstrip() if is_call else self._held[:size]
            self._held, self._searched = self._held[size:], 0
        return "" if end and self.calls and not content.strip() else content

    def _tell(self, values: Sequence[object], asked: Calls) -> bool:
        """Keep values as calls if there are any and all are of tools that are offered."""
        calls = [_call(value, asked) for value in values]
        if not calls or None in calls:
            return False
        self.calls += [
            {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
            for function in (calls[: not self.calls] if asked.single else calls)
        ]
        return True


def _call(value: object, asked: Calls) -> dict[str, Any] | None:
    """Return a call as OpenAI's interface has it, or None if it is none of a tool offered."""
    if not isinstance(value, dict):
        return None
    # A name alone calls without arguments; beside another key (``parameters``) it would lose them.
    name, arguments = value.get("name"), value.get("arguments", {} if len(value) == 1 else None)
    names = [tool["function"]["name"] for tool in asked.tools]
    if name not in names or not isinstance(arguments, dict):
        return None
    try:
        written = json.dumps(arguments, allow_nan=False)
        from_json(written)  # a client sends it back: lone surrogates would be refused then
    except ValueError:
        return None
    return {"name": name, "arguments": written}


def _values(text: str) -> list[Any]:
    """Return the JSON values that a text is; none where it is something else."""
    try:
        return json_values(text)
    except (ValueError, RecursionError):
        return []


def json_values(text: str) -> list[Any]:
    """Return the JSON values that a text is, one after the other, each fenced or not.

    A list is opened one level. A closing fence alone, behind a value, is skipped.
    """
    text, values, fenced = text.strip(), list[Any](), False
    while text:
        opens = not fenced and text.startswith(_FENCE)
        if opens or ((fenced or values) and text.startswith(_FENCE_END)):
            text, fenced = text[len(_FENCE if opens else _FENCE_END) :].lstrip(), opens
            continue
        value, end = json.JSONDecoder().raw_decode(text)
        values += value if isinstance(value, list) else [value]
        text = text[end:].lstrip()
    return values
