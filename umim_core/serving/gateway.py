"""Gateway in front of another engine: it merges prompts and forwards them as ids.

    client   /v1/chat/completions   messages         -> template, ids, ranges that may merge
    engine   /v1/completions        prompt: ids      <- merged by the spans of an exported model
    client   chat.completion(.chunk)                 <- the engine's answer in a chat's form

A request that cannot be merged, or does not want to be, goes to the engine as it came: parts that
are no text, fields that change the template, ``logprobs`` of a chat, tools of a model whose form of
calls is not known, ``x-umim-merge: off``. Where merging itself fails the raw ids are sent. No torch
is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import httpx
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from umim_core.addresses import has_credentials
from umim_core.errors import ConfigError, GenerationError, UmimError, require
from umim_core.rules.matcher import PromptIds
from umim_core.serving import guard
from umim_core.serving import openai_api as api
from umim_core.serving.prompt_merger import PromptMerger
from umim_core.serving.prompt_reader import PromptReader
from umim_core.serving.tool_calls import Calls, Reply, call_marks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONNECT_SECONDS: Final = 5.0  # also until a connection is free
_HEALTH_SECONDS: Final = 5.0
_KNOWN_SECONDS: Final = 60.0  # what an engine says of its models
_UNKNOWN_SECONDS: Final = 5.0
_CONNECTIONS: Final = 256
_MOST_BYTES: Final = 16 << 20  # of an engine's answer
_MOST_EVENT: Final = 4 << 20
_NEVER: Final = -100.0  # least logit bias of OpenAI's interface; e^-100 of a chance
# Fields that the engine must see with the prompt as it came.
_SEEN: Final = {
    api.CHAT: (
        "audio", "chat_template", "chat_template_kwargs", "continue_final_message", "documents",
        "echo", "function_call", "functions", "logprobs", "modalities", "reasoning",
        "reasoning_effort", "response_format", "thinking", "top_logprobs",
    ),
    api.COMPLETIONS: ("echo", "suffix"),
}  # fmt: skip
_ID: Final = re.compile("0|[1-9][0-9]{0,18}")
_SHOWN: Final = (b"content-type", b"retry-after")  # headers of an engine's answer
Translate = Callable[[dict[str, Any]], dict[str, Any]]


class _Chat(api.ChatPrompt):
    """What a chat's prompt is written from; other fields are the engine's."""

    model_config = ConfigDict(extra="ignore")

    add_generation_prompt: Literal[True] = True


class Gateway(guard.ApiServer):
    """The routes of a gateway before the engine at ``upstream``, which may want a bearer ``key``.

    Unless that engine masks the ids of spans, every request carries a logit bias against them.
    """

    def __init__(
        self,
        upstream: httpx.URL,
        tokenizer: PreTrainedTokenizerBase,
        merger: PromptMerger,
        limits: guard.Limits,
        key: str | None = None,
        upstream_masks: bool = False,
    ) -> None:
        super().__init__(guard.ServerMetrics(), limits)
        self._reader = PromptReader(tokenizer, merger.roles)
        self._merger = merger
        special = call_marks(tokenizer)  # an engine shows no special token: such marks are lost
        self._call_marks = None if special else special
        self._models: dict[str, int | None] = {}  # how many tokens each has room for, if it says so
        self._known_until = 0.0
        first, count = merger.vocab_size, len(merger.rules)
        self._bias = (
            {} if upstream_masks else dict.fromkeys(map(str, range(first, first + count)), _NEVER)
        )
        headers = {b"accept-encoding": b"identity"}
        if key is not None:
            headers[b"authorization"] = b"Bearer " + key.encode("utf-8", "surrogateescape")
        self._client = httpx.AsyncClient(
            base_url=upstream,
            headers=headers,
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS, pool=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=_CONNECTIONS),
            trust_env=False,
        )

    @asynccontextmanager
    async def life(self) -> AsyncIterator[None]:
        async with self._client:
            yield

    async def models(self, request: Request) -> Response:
        answer = await self._asked(request, "GET", api.MODELS)
        _models_of(answer)
        return _passed(answer)

    async def health(self, request: Request) -> Response:
        return _passed(
            await self._asked(request, "GET", "/health", until=guard.deadline(_HEALTH_SECONDS))
        )

    async def answer(self, path: str, request: Request) -> Response:
        """Send a prompt's merged ids; where the engine must see more, the request as it came."""
        document = api.read_json(await guard.read_body(request, self.limits))
        translate: Translate | None = None
        if guard.merging_wanted(request):
            path, document, translate = await self._merged(request, path, document)
        return await self._forward(request, path, document, translate)

    async def _merged(
        self, request: Request, path: str, document: dict[str, Any]
    ) -> tuple[str, dict[str, Any], Translate | None]:
        """Return path and body of a merged request, and what its answer is for the client."""
        prompt, calls, reason = self._mergeable(path, document)
        if prompt is None:
            if reason:
                self.metrics.stays_raw(reason, f"the engine must see {reason}")
            return path, document, None
        model, context = await self._model(request, document.get("model"))
        try:
            most = context and context * self._merger.rules.longest
            read = await self._reader.read(prompt, most, calls)
        except GenerationError as error:  # the engine may have another template, or more room
            self.metrics.stays_raw("template", error.rule)
            return path, document, None
        if read.unmerged:
            self.metrics.stays_raw("template", read.unmerged)
        ids = self._cut(read)
        counts = {"raw_prompt_tokens": len(read.ids), "merged_prompt_tokens": len(ids)}
        if path == api.COMPLETIONS:

            def counted(part: dict[str, Any]) -> dict[str, Any]:
                count = part.get("usage")
                return {**part, "usage": {**count, "umim": counts}} if count else part

            return path, {**document, "prompt": ids}, counted
        answer = api.Answer(True, model, partial(Reply, calls))

        def translated(part: dict[str, Any]) -> dict[str, Any]:
            completion = _completion(part)
            new = [(c.index, c.text or "", c.finish_reason) for c in completion.choices or ()]
            count = completion.usage and {**completion.usage, "umim": counts}
            chunk = answer.chunk(new)
            shown = chunk if document.get("stream") else answer.whole()
            return {**shown, "usage": count} if "usage" in part else shown

        return api.COMPLETIONS, self._as_completion(document, ids, context), translated

    def _mergeable(
        self, path: str, document: dict[str, Any]
    ) -> tuple[str | _Chat | None, Calls | None, str]:
        """Return a prompt that may merge with its calls, or what the engine must see, or neither.

        Ids are not merged.
        """
        for name in _SEEN[path]:
            if document.get(name) is not False and not api.neutral(name, document.get(name)):
                return None, None, name
        if path == api.COMPLETIONS:
            prompt = document.get("prompt")
            if isinstance(prompt, list) and len(prompt) == 1:
                prompt = prompt[0]
            if prompt and isinstance(prompt, str):
                return prompt, None, ""
            texts = isinstance(prompt, list) and any(isinstance(text, str) for text in prompt)
            return None, None, "prompt" if texts else ""  # several, each with an answer of its own
        try:
            chat = _Chat.model_validate(document)
            return chat, Calls.of(chat, self._call_marks), ""
        except ValidationError as error:
            return None, None, str(error.errors()[0]["loc"][0])
        except api.ApiError:  # the engine may know more, or say why not
            return None, None, "tools"

    def _cut(self, read: PromptIds) -> list[int]:
        try:
            merged = self._merger.merge(read.ids, read.parts)
        except UmimError as error:
            self.metrics.stays_raw("merging", error.rule)
            merged = read.ids.tolist()
        self.metrics.raw_tokens.inc(len(read.ids))
        self.metrics.merged_tokens.inc(len(merged))
        return merged

    def _as_completion(
        self, chat: dict[str, Any], ids: list[int], context: int | None
    ) -> dict[str, Any]:
        left_out = {*_SEEN[api.CHAT], *_Chat.model_fields}
        body = {name: value for name, value in chat.items() if name not in left_out}
        most = body.pop("max_completion_tokens", None)
        most = body.get("max_tokens") if most is None else most
        if most is None:  # completions get few
            most = self.limits.new_tokens
            most = max(1, min(most, context - len(ids))) if context else most
        return {**body, "prompt": ids, "max_tokens": most}

    async def _model(self, request: Request, asked: object) -> tuple[str, int | None]:
        """Return a model's name and how many tokens it has room for, if the engine says so.

        Without a name it is the engine's first; what the engine says is kept a while.
        """
        until = guard.deadline(_HEALTH_SECONDS)
        now = until - _HEALTH_SECONDS
        if now >= self._known_until:
            try:
                answer = await self._asked(request, "GET", api.MODELS, until=until)
                models = _models_of(answer)
            except api.ApiError:  # a request that needs the engine will say what is wrong
                models = []
            self._models = {
                one["id"]: length if type(length) is int and length > 0 else None
                for one in models
                for length in [one.get("max_model_len")]
                if isinstance(one.get("id"), str)
            }
            self._known_until = now + (_KNOWN_SECONDS if self._models else _UNKNOWN_SECONDS)
        first = next(iter(self._models), "")
        name = str(asked or first)
        return name, self._models.get(name) or self._models.get(first)

    async def _forward(
        self, request: Request, path: str, body: dict[str, Any], translate: Translate | None
    ) -> Response:
        """Send a body to the engine and return its answer, translated where it is one."""
        until = guard.deadline(self.limits.answer_seconds)
        answer = await self._asked(request, "POST", path, self._masked(body), until)
        own_bias = bool(self._bias) and not body.get("logit_bias")
        if own_bias and answer.status_code == 400 and b"logit_bias" in answer.content:
            rule = "the engine behind this gateway must take logit_bias, which bars ids of spans"
            remedy = "Where it never writes them, start the gateway with --upstream-masks."
            raise api.ApiError(502, "upstream_unsupported", rule, "one that refuses it", remedy)
        if not answer.is_closed:
            return guard.EventStream(_documents(answer, translate), until)
        if answer.status_code != 200 or translate is None:
            return _passed(answer)
        document = _document(answer.content)
        if document.get("error"):  # some engines say it with status 200
            return JSONResponse(document, 502)
        if not document.get("choices"):
            raise _malformed("an engine's answer must hold choices")
        return JSONResponse(translate(document))

    def _masked(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a request with a bias against the ids of spans, whatever bias the client asks for.

        Engines read ids as numbers, by rules of their own: so an id is written in one way.
        """
        if not self._bias:
            return body
        asked = body.get("logit_bias") or {}
        if not isinstance(asked, dict) or not all(map(_ID.fullmatch, asked)):
            rule = "logit_bias must be an object of plain ids"
            raise api.bad_field("logit_bias", rule, "something else", 'Write an id as "17".')
        return {**body, "logit_bias": {**asked, **self._bias}}

    async def _asked(
        self,
        request: Request,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        until: float | None = None,
    ) -> httpx.Response:
        """Return the engine's answer: whole and closed, or open if it is a stream."""
        streamed = bool(body and body.get("stream"))
        until = until or guard.deadline(self.limits.answer_seconds)
        try:
            built = self._client.build_request(method, path, json=body)
        except ValueError as error:  # 1e999
            rule, remedy = "numbers must be finite", "Send a smaller one."
            raise api.ApiError(400, "invalid_json", rule, str(error), remedy) from error

        async def answered() -> httpx.Response:
            async with AsyncExitStack() as closing:
                answer = await self._client.send(built, stream=True)
                closing.push_async_callback(answer.aclose)
                if answer.headers.get("content-encoding", "identity").lower() != "identity":
                    raise _malformed("the engine must not compress its answer")
                if not 200 <= answer.status_code < 600:
                    raise _malformed("the engine must answer with a status of HTTP")
                if streamed and answer.status_code == 200:
                    closing.pop_all()
                    return answer
                raw = answer.headers.raw
                shown = [(name, value) for name, value in raw if name.lower() in _SHOWN]
                content = await _whole(answer)
                return httpx.Response(answer.status_code, headers=shown, content=content)

        try:
            return await guard.unless_gone(request, answered(), until)
        except httpx.PoolTimeout as error:
            rule = f"at most {_CONNECTIONS} requests run"
            raise api.try_later("overloaded", rule, "more") from error
        except httpx.HTTPError as error:
            raise _broken(type(error).__name__) from error


def address_of(upstream: str) -> httpx.URL:
    """Return an address that is safe to show; no other is shown."""
    remedy = "Give http://127.0.0.1:8000; --upstream-key-env names a token."
    rule = "an upstream's address must hold neither user and password nor options"
    require(not has_credentials(upstream), ConfigError, rule, "one that does", remedy)
    try:
        address = httpx.URL(upstream.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL:
        address = httpx.URL()
    web = address.scheme in ("http", "https") and bool(address.host) and not address.userinfo
    rule = "an upstream must be the address of a server"
    require(web, ConfigError, rule, "one of another form", remedy)
    return address


def _broken(value: str) -> api.ApiError:
    """Return what a failed exchange with the engine means to the client."""
    rule = "the engine behind this gateway must answer"
    return api.ApiError(502, "upstream_unreachable", rule, value, "Try again later.")


def _malformed(rule: str) -> api.ApiError:
    return api.ApiError(502, "upstream_malformed", rule, "something else")


async def _whole(answer: httpx.Response) -> bytes:
    body = bytearray()
    async for part in answer.aiter_raw():
        body += part
        if len(body) > _MOST_BYTES:
            raise _malformed(f"an engine's answer may have {_MOST_BYTES} bytes")
    return bytes(body)


async def _documents(
    answer: httpx.Response, translate: Translate | None
) -> AsyncGenerator[dict[str, Any], None]:
    """Give the documents of an engine's stream, translated but for an error."""
    try:
        async for line in _lines(answer):
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            part = _document(data)
            yield part if part.get("error") or translate is None else translate(part)
        raise _broken("a stream that ended early")
    except httpx.HTTPError as error:
        raise _broken(type(error).__name__) from error
    finally:
        await answer.aclose()


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Give the lines of a stream; only LF and CRLF end one, while a model may write U+2028."""
    line = bytearray()
    async for part in answer.aiter_raw():
        *ends, rest = part.split(b"\n")
        for end in ends:
            yield bytes(line + end).removesuffix(b"\r")
            line.clear()
        line += rest
        if len(line) > _MOST_EVENT:
            raise _malformed(f"an event of an engine may have {_MOST_EVENT} bytes")
    yield bytes(line)


class _EngineChoice(BaseModel, strict=True):
    index: NonNegativeInt = 0
    text: str | None = None
    finish_reason: str | None = None


class _Completion(BaseModel, strict=True):
    choices: list[_EngineChoice] | None = None
    usage: dict[str, Any] | None = None


def _completion(document: object) -> _Completion:
    """Return a document of the engine's; here alone it is said that one cannot be translated."""
    try:
        return _Completion.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise _malformed(f"an engine's answer must be a completion ({place})") from None


def _document(content: bytes) -> dict[str, Any]:
    """Return a JSON object of the engine's, all of whose numbers are finite."""
    try:
        document = from_json(content, allow_inf_nan=False)
        json.dumps(document, allow_nan=False)  # 1e999
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise _malformed("the engine must answer with a JSON object")
    return document


def _models_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the models that an engine lists, none where its answer is an error."""
    if answer.status_code != 200:
        return []
    models = _document(answer.content).get("data")
    if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
        raise _malformed("the engine must list its models")
    return models


def _passed(answer: httpx.Response) -> Response:
    response = Response(answer.content, answer.status_code)
    response.raw_headers += answer.headers.raw
    return response
