"""Bodies of requests to our own engine: OpenAI's fields, of which some may only be neutral."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import from_json

from umim_core.serving.api_errors import ApiError, field_error

MAX_STOPS: Final = 16
_COLDEST: Final = 1e-6  # logits over it are still numbers
# Fields that ask for what the engine does not do, and the values that ask for nothing.
_UNSUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "web_search_options": (None,),
}
# Fields about the caller or the service that change no token.
_IGNORED: Final = (
    "metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user",
)  # fmt: skip
Stop = Annotated[str, Field(min_length=1, max_length=256)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Body(_Strict):
    """Fields that chats and completions share."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @field_validator("temperature")
    @classmethod
    def _divides(cls, temperature: float | None) -> float | None:
        if temperature is not None and 0 < temperature < _COLDEST:
            raise ValueError(f"must be 0 or at least {_COLDEST}")
        return temperature

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def usage_wanted(self) -> bool:
        """Whether a stream ends with a count of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


Checked = TypeVar("Checked", bound=Body)


class TextPart(_Strict):
    """A part of a message; there are texts only."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """A message of a chat."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None

    def plain(self) -> dict[str, str]:
        """Return role and content as a template reads them."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text}


class ChatBody(Body):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def new_tokens(self) -> int | None:
        """Most tokens of the answer."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(Body):
    """Body of ``/v1/completions``; there is one prompt, a text or ids."""

    prompt: str | TokenIds

    @property
    def new_tokens(self) -> int | None:
        """Most tokens of the answer."""
        return self.max_tokens


def read_json(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a body."""
    try:
        document = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(
            400, "invalid_json", "a body must be JSON", str(error)[:100], "Send a JSON object."
        ) from error
    if not isinstance(document, dict):
        raise ApiError(400, "invalid_json", "a body must be a JSON object", type(document).__name__)
    return document


def read_chat(raw: bytes) -> ChatBody:
    """Return the checked body of a chat."""
    return _checked(ChatBody, _supported(read_json(raw)))


def read_completion(raw: bytes) -> CompletionBody:
    """Return the checked body of a completion."""
    document = _supported(read_json(raw))
    prompt = document.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise ApiError(
                400, "unsupported", "a request holds one prompt", f"{len(prompt)} prompts",
                "Send one request each; they run together.", param="prompt",
            )  # fmt: skip
        document["prompt"] = prompt[0]
    return _checked(CompletionBody, document)


def _checked(kind: type[Checked], document: dict[str, Any]) -> Checked:
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise field_error(error) from None  # its message repeats the prompt


def _supported(document: dict[str, Any]) -> dict[str, Any]:
    """Return a body without neutral fields that the engine does not know."""
    for name, neutral in _UNSUPPORTED.items():
        if name in document and not _is_one_of(document[name], neutral):
            raise ApiError(
                400, "unsupported", f"{name} is not supported by UMIM's own engine",
                "a request that sets it", "Leave it out, or serve an exported model by another "
                "engine behind `umim serve --upstream`.", param=name,
            )  # fmt: skip
    left_out = {*_UNSUPPORTED, *_IGNORED}
    return {name: value for name, value in document.items() if name not in left_out}


def _is_one_of(value: object, known: tuple[object, ...]) -> bool:
    """Return whether a value is known; 0 is not False: it asks for the chosen ids' logprobs."""
    flag = isinstance(value, bool)
    return any(value == other and flag == isinstance(other, bool) for other in known)
