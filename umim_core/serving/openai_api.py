"""OpenAI's interface: bodies of requests, answers whole or as events, errors.

A field may be missing or neutral: ``null``, ``[]``, ``{}`` and ``""`` ask for nothing, wherever
they stand; so do some values of fields that our own engine does not support.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, from_json

from umim_core.errors import ContextLengthError, NumericalError, UmimError, field_rule
from umim_core.text.roles import Role

if TYPE_CHECKING:
    from umim_core.serving.tool_calls import Reply

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
MODELS: Final = "/v1/models"
MODEL: Final = MODELS + "/{name:path}"
MAX_STOPS: Final = 16
MAX_MESSAGES: Final = 4096
MAX_TOOLS: Final = 1024
RETRY_SECONDS: Final = 1
DONE: Final = b"data: [DONE]\n\n"
_COLDEST: Final = 1e-6  # logits over it are still numbers
_NOTHING: Final[tuple[object, ...]] = (None, "", [], {})
# Of these a value that asks for nothing counts as none, though they are read.
_READ: Final = ("parallel_tool_calls", "tool_call_id", "tool_calls", "tool_choice", "tools")
# Fields that ask for what our own engine does not do, and what else asks for nothing.
_UNSUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": (),
    "logit_bias": (),
    "logprobs": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": (),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# Fields about the caller or the service that change no token.
_IGNORED: Final = (
    "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "user",
)  # fmt: skip
# What is said of values but numbers: they may be of a prompt.
_KINDS: Final = {
    dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null",
}  # fmt: skip
# What is said of types in words of JSON.
_SAID: Final = {
    "dict_type": "must be an object",
    "json_invalid": "must hold JSON",
    "json_type": "must be a text that holds JSON",
    "model_type": "must be an object",
}
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    502: "upstream_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(UmimError):
    """A request cannot be answered: ``code`` names the reason for programs, ``param`` the field."""

    def __init__(
        self,
        status: int,
        code: str,
        rule: str,
        value: object = None,
        remedy: str = "",
        *,
        param: str | None = None,
    ) -> None:
        super().__init__(rule, value, remedy)
        self.status, self.code, self.param = status, code, param

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep all parts where a replica sends it."""
        parts = (self.status, self.code, self.rule, self.value, self.remedy)
        return type(self), parts, {"param": self.param}

    def document(self) -> dict[str, Any]:
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": _TYPES.get(self.status, other)}
        return {"error": {**error, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 503:
            return {"retry-after": str(RETRY_SECONDS)}
        return {"www-authenticate": "Bearer"} if self.status == 401 else {}


def bad_field(param: str, rule: str, value: object, remedy: str = "") -> ApiError:
    return ApiError(400, "invalid_field", rule, value, remedy, param=param)


def try_later(code: str, rule: str, value: object) -> ApiError:
    """Return a 503: what cannot be answered now may be later."""
    return ApiError(503, code, rule, value, "Try again later.")


def unknown_model(served: str, asked: str) -> ApiError:
    rule = "the model must be the one that is served"
    return ApiError(404, "model_not_found", rule, asked, f"Ask for {served}.", param="model")


def api_error(error: UmimError) -> ApiError:
    """Return an error of the library as one of the interface: 400, but for numbers gone wrong."""
    if isinstance(error, ApiError):
        return error
    status, code, remedy = 400, "invalid_request", error.remedy
    if isinstance(error, NumericalError):
        status, code = 500, "numerical_error"
    elif isinstance(error, ContextLengthError):  # clients cut their messages at OpenAI's name
        code = "context_length_exceeded"
        remedy = "Shorten the prompt, or ask for fewer tokens."  # its own names options of Python
    return ApiError(status, code, error.rule, error.value, remedy)


def neutral(name: str, value: object) -> bool:
    """Return whether a field asks for nothing; 0 is no False: it asks for chosen ids' logprobs."""
    flag = isinstance(value, bool)
    known = (*_NOTHING, *_UNSUPPORTED.get(name, ()))
    return any(value == other and flag == isinstance(other, bool) for other in known)


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, fields: object) -> object:
        if not isinstance(fields, dict):
            return fields
        return {
            name: value
            for name, value in fields.items()
            if value is not None
            and not (name in _READ and value in _NOTHING)
            and (name in cls.model_fields or not neutral(name, value))
        }


def _short(expand: Callable[[str], object], whole: type, rule: str) -> BeforeValidator:
    """Let a field be given in short, by a text that is expanded to its whole form."""

    def expanded(value: object) -> object:
        value = expand(value) if isinstance(value, str) else value
        if not isinstance(value, whole):
            raise ValueError(rule)
        return value

    return BeforeValidator(expanded)


_TEXT_OR_LIST: Final = "must be a text or a list"
_Count = Annotated[int, Field(ge=1)] | None
_Stop = Annotated[str, Field(min_length=1, max_length=256)]
_Unread = Annotated[Any, Field(exclude=True)]  # what clients add to an answer or for a cache
_Ids = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1, fail_fast=True)]


class StreamOptions(_Fields):
    include_usage: bool = False
    include_obfuscation: bool = False


class Body(_Fields):
    """Fields that chats and completions share; some have the names of ``PlainOptions``."""

    model: str | None = None
    max_tokens: _Count = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: _Count = None
    seed: Annotated[int, AfterValidator(lambda seed: seed % (1 << 64))] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    stop: Annotated[
        list[_Stop],
        Field(max_length=MAX_STOPS, fail_fast=True),
        _short(lambda text: [text], list, _TEXT_OR_LIST),
    ] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @field_validator("temperature")
    @classmethod
    def _divides(cls, temperature: float | None) -> float | None:
        if temperature is not None and 0 < temperature < _COLDEST:
            raise ValueError(f"must be 0 or at least {_COLDEST}")
        return temperature

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens


class _Function(_Fields):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(_Fields):
    type: Literal["function"]
    function: _Function


class _Called(_Fields):
    name: str
    arguments: Annotated[Json[dict[str, Any]], BeforeValidator(lambda text: text or "{}")]
    parsed_arguments: _Unread = None


class _ToolCall(_Fields):
    id: str
    type: Literal["function"] = "function"
    function: _Called
    index: _Unread = None  # of a stream


class _Part(_Fields):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: _Unread = None


class Message(_Fields):
    """A message of a chat."""

    role: str
    content: Annotated[
        list[_Part],
        Field(fail_fast=True),
        _short(lambda text: [{"type": "text", "text": text}], list, _TEXT_OR_LIST),
    ] = []
    name: str | None = None
    annotations: _Unread = None
    tool_calls: list[_ToolCall] = []
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return what a template reads; it writes arguments of calls as JSON, or in its own way."""
        text = "".join(part.text for part in self.content)
        message: dict[str, Any] = {"role": self.role, "content": text}
        message |= {"name": self.name, "tool_call_id": self.tool_call_id}
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message


_CHOICES: Final = ("none", "auto", "required")


class _ToolChoice(_Fields):
    type: Literal["none", "auto", "required", "function"]
    function: _Function | None = None

    @model_validator(mode="after")
    def _names(self) -> Self:
        if (self.type == "function") != (self.function is not None):
            raise ValueError("must have a function exactly when its type is function")
        return self


class ChatPrompt(_Fields):
    """Fields that say what a chat's prompt is: messages, tools, and whose contents merge."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = []
    tool_choice: Annotated[
        _ToolChoice,
        _short(
            lambda name: {"type": name} if name in _CHOICES else name,
            dict,
            "must be none, auto, required or an object",
        ),
    ] = _ToolChoice(type="auto")
    parallel_tool_calls: bool = True
    roles: list[Role] | None = None

    @field_validator("roles")
    @classmethod
    def _once(cls, roles: list[Role]) -> list[Role]:
        if len(set(roles)) < len(roles):
            raise ValueError("must name each role once")
        return roles


class ChatBody(Body, ChatPrompt):
    max_completion_tokens: _Count = None

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(Body):
    """Body of ``/v1/completions`` whose only prompt is a text."""

    prompt: Annotated[str, _short(str, str, _TEXT_OR_LIST)]


class IdsBody(Body):
    prompt: _Ids


AnyBody = ChatBody | CompletionBody | IdsBody


def read_json(raw: bytes) -> dict[str, Any]:
    try:
        document = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        rule, remedy = "a body must be JSON", "Send a JSON object."
        raise ApiError(400, "invalid_json", rule, str(error)[:100], remedy) from error
    if not isinstance(document, dict):
        rule, found = "a body must be a JSON object", _KINDS.get(type(document), document)
        raise ApiError(400, "invalid_json", rule, found, "Send a JSON object.")
    return document


def parse_body(path: str, raw: bytes) -> AnyBody:
    """Return the body of a request for one of the two paths; an error quotes no prompt."""
    document = {k: v for k, v in read_json(raw).items() if k not in _IGNORED}
    prompt = document.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            rule, value = "a request holds one prompt", f"{len(prompt)} prompts"
            remedy = "Send one request each; they run together."
            raise ApiError(400, "unsupported", rule, value, remedy, param="prompt")
        document["prompt"] = prompt = prompt[0]
    other = IdsBody if isinstance(prompt, list) else CompletionBody
    try:
        return (ChatBody if path == CHAT else other).model_validate(document)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        raise _field_error(found, document) from None  # its message repeats the prompt


def _field_error(error: ErrorDetails, document: Any) -> ApiError:
    """Return what the check of a body found first; what is given in short has no parts."""
    place: list[str] = []
    for step in error["loc"]:
        if not isinstance(document, dict | list):
            break
        place.append(str(step))
        document = document.get(step) if isinstance(document, dict) else document[int(step)]
    param, value = ".".join(place), error["input"]
    if error["type"] == "extra_forbidden" and param in _UNSUPPORTED:
        rule = f"{param} is not supported by UMIM's own engine"
        found = "a request that sets it"
        remedy = "Leave it out, or serve an exported model behind `umim serve --upstream`."
        return ApiError(400, "unsupported", rule, found, remedy, param=param)
    if error["type"] == "extra_forbidden":
        rule, remedy = "fields must be ones that this server knows", "Leave it out."
        return ApiError(400, "unknown_field", rule, param, remedy, param=param)
    shown = _KINDS.get(type(value), value)
    if error["type"] == "literal_error" and isinstance(value, str):
        shown = "another text"
    name, said = param or "the body", _SAID.get(error["type"])
    rule = field_rule(name, error) if said is None else f"{name} {said}"
    remedy = "Correct it, or leave it out."
    if error["type"] == "missing":
        shown, remedy = "nothing", "Add it."
    return ApiError(400, "invalid_field", rule, shown, remedy, param=param or None)


def event(document: dict[str, Any]) -> bytes:
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return b"data: " + text.encode() + b"\n\n"


def usage(raw: int, merged: int, generated: int, cached: int) -> dict[str, Any]:
    """Return the count of tokens; the model holds the merged units, some cached already."""
    return {
        "prompt_tokens": merged,
        "completion_tokens": generated,
        "total_tokens": merged + generated,
        "umim": {"raw_prompt_tokens": raw, "merged_prompt_tokens": merged},
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Answer:
    """The documents of one answer, a chat's or a completion's: chunks, or all of them as one.

    ``new_reply`` reads what is written of each choice.
    """

    def __init__(self, chat: bool, model: str, new_reply: Callable[[], Reply]) -> None:
        self._chat = chat
        self._replies: defaultdict[int, Reply] = defaultdict(new_reply)
        self._head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
        }

    def chunk(self, pieces: Sequence[tuple[int, str, str | None]]) -> dict[str, Any]:
        """Return the document of what a stream adds.

        Pieces are a choice's number, text, and why it ended; None if it goes on.
        """
        shown = []
        for index, piece, finish in pieces:
            first, reply = index not in self._replies, self._replies[index]
            told = len(reply.calls)
            text, calls = reply.add(piece, finish, finish is not None)
            delta: dict[str, Any] = {"content": text} if text or first else {}
            if first:
                delta["role"] = "assistant"
            if calls:
                delta["tool_calls"] = [
                    {"index": number, **call} for number, call in enumerate(calls, told)
                ]
            shown.append((index, {"delta": delta} if self._chat else {"text": text}))
        return self._document("chat.completion.chunk", shown)

    def whole(self) -> dict[str, Any]:
        shown = []
        for index, reply in sorted(self._replies.items()):
            if reply.finish is None:
                reply.add("", None, True)
            fields: dict[str, Any] = {"text": reply.text}
            if self._chat:
                text = None if reply.calls and not reply.text else reply.text
                fields = {"message": {"role": "assistant", "content": text, "refusal": None}}
                if reply.calls:
                    fields["message"]["tool_calls"] = reply.calls
            shown.append((index, fields))
        return self._document("chat.completion", shown)

    def _document(self, kind: str, shown: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        choices = [
            {"index": n, **fields, "logprobs": None, "finish_reason": self._replies[n].finish}
            for n, fields in shown
        ]
        kind = kind if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}
