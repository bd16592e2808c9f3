"""Gateway in front of another engine: it merges prompts and forwards them as ids.

    client   /v1/chat/completions   messages         -> template, ids, ranges that may merge
    engine   /v1/completions        prompt: ids      <- merged by the spans of an exported model
    client   chat.completion(.chunk)                 <- the engine's answer in a chat's form

A request that cannot be merged, or does not want to be, goes to the engine as it came: tools, parts
that are no text, fields that change the template, ``x-umim-merge: off``. Where merging itself fails
the raw ids are sent. No torch is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import httpx
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from umim_core.errors import ConfigError, GenerationError, UmimError
from umim_core.serving.answers import Answer, Choice
from umim_core.serving.api_bodies import read_json
from umim_core.serving.api_errors import ApiError, try_later
from umim_core.serving.guard import (
    EventStream,
    Limits,
    deadline,
    guarded,
    merging_wanted,
    read_body,
    unless_gone,
)
from umim_core.serving.metrics import ServerMetrics
from umim_core.serving.prompt_merger import PromptMerger
from umim_core.text.chat_parts import encode_parts, write_chat
from umim_core.text.token_ids import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHAT: Final = "/v1/chat/completions"
_COMPLETIONS: Final = "/v1/completions"
_CONNECT_SECONDS: Final = 5.0  # also until a connection is free
_HEALTH_SECONDS: Final = 5.0
_CONNECTIONS: Final = 256
_NEVER: Final = -100.0  # least logit bias of OpenAI's interface; e^-100 of a chance
# Fields of a chat that the engine must see with the messages.
_WITH_MESSAGES: Final = (
    "audio", "chat_template", "chat_template_kwargs", "continue_final_message", "documents",
    "function_call", "functions", "modalities", "reasoning_effort", "response_format",
    "tool_choice", "tools",
)  # fmt: skip
_OF_MESSAGES: Final = {"role", "content", "name"}
_log: Final = logging.getLogger("umim.serve")
Translate = Callable[[dict[str, Any]], dict[str, Any]]


class MergedPrompt(NamedTuple):
    """Number of a prompt's raw tokens, and the ids that are sent."""

    raw: int
    ids: list[int]


class Gateway:
    """The routes of a gateway.

    Args:
        upstream: Address of the engine, without ``/v1``.
        tokenizer: The exported model's.
        merger: Merges by its spans.
        limits: Bounds of requests.
        key: Bearer token that the engine wants; None for none.
        upstream_masks: Whether the engine itself never writes the ids of spans. Otherwise every
            request carries a logit bias against them.
    """

    def __init__(
        self,
        upstream: str,
        tokenizer: PreTrainedTokenizerBase,
        merger: PromptMerger,
        limits: Limits,
        key: str | None = None,
        upstream_masks: bool = False,
    ) -> None:
        self._tokenizer, self._merger, self._limits = tokenizer, merger, limits
        self._encoding = Lock()  # a tokenizer's settings are not for two threads
        self._context: int | None = None
        first, count = merger.vocab_size, merger.span_count
        self._bias = (
            {} if upstream_masks else dict.fromkeys(map(str, range(first, first + count)), _NEVER)
        )
        self.metrics = ServerMetrics()
        try:
            address = httpx.URL(upstream.rstrip("/").removesuffix("/v1"))
        except httpx.InvalidURL as error:
            raise _no_address(upstream) from error
        if address.scheme not in ("http", "https") or not address.host:
            raise _no_address(upstream)
        self._client = httpx.AsyncClient(
            base_url=address,
            headers={} if key is None else {"authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS, pool=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=_CONNECTIONS),
            trust_env=False,
        )

    def app(self, token: str | None) -> Starlette:
        """Return the application, for requests with a bearer token if there is one."""
        routes = [
            Route(_CHAT, self._chat, methods=["POST"]),
            Route(_COMPLETIONS, self._completion, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
        ]
        return guarded(routes, token, self.metrics, self._life)

    @asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        async with self._client:
            yield

    async def _models(self, request: Request) -> Response:
        return _passed(await self._asked(request, "GET", "/v1/models"))

    async def _health(self, request: Request) -> Response:
        limits = replace(self._limits, answer_seconds=_HEALTH_SECONDS)
        return _passed(await self._asked(request, "GET", "/health", until=deadline(limits)))

    async def _chat(self, request: Request) -> Response:
        document = read_json(await read_body(request, self._limits))
        messages = _plain_messages(document) if merging_wanted(request) else None
        prompt = None if messages is None else await run_in_threadpool(self._merged_chat, messages)
        if prompt is None:
            return await self._forward(request, _CHAT, document, None)
        answer = Answer(True, str(document.get("model") or ""))
        streamed = bool(document.get("stream"))

        def translate(part: dict[str, Any]) -> dict[str, Any]:
            choices = [
                Choice(
                    choice.get("index", 0),
                    choice.get("text") or "",
                    choice.get("finish_reason"),
                    _chat_logprobs(choice.get("logprobs")),
                )
                for choice in _choices(part)
            ]
            count = _counted(part.get("usage"), prompt)
            return answer.chunk(choices, count) if streamed else answer.whole(choices, count)

        body = {**document, "prompt": prompt.ids}
        del body["messages"]
        body.pop("add_generation_prompt", None)  # it is true: the prompt has it
        asked = body.pop("max_completion_tokens", None)
        asked = body.get("max_tokens") if asked is None else asked
        body["max_tokens"] = await self._room(request, prompt) if asked is None else asked
        best = body.pop("top_logprobs", None)
        if body.pop("logprobs", None):
            body["logprobs"] = best or 0
        return await self._forward(request, _COMPLETIONS, body, translate)

    async def _completion(self, request: Request) -> Response:
        document = read_json(await read_body(request, self._limits))
        text = document.get("prompt")
        if isinstance(text, list) and len(text) == 1:
            text = text[0]
        plain = isinstance(text, str) and not document.get("echo") and not document.get("suffix")
        if not merging_wanted(request) or not plain:
            return await self._forward(request, _COMPLETIONS, document, None)
        prompt = await run_in_threadpool(self._merged_text, str(text))
        body = {**document, "prompt": prompt.ids}

        def translate(part: dict[str, Any]) -> dict[str, Any]:
            count = _counted(part.get("usage"), prompt)
            return part if count is None else {**part, "usage": count}

        return await self._forward(request, _COMPLETIONS, body, translate)

    def _merged_chat(self, messages: list[dict[str, str]]) -> MergedPrompt | None:
        """Return a chat's prompt; None where the engine had better apply its own template."""
        with self._encoding:
            try:
                written = write_chat(messages, self._tokenizer)
                ids, ranges = encode_parts(self._tokenizer, written.text, written.places)
            except GenerationError as error:
                _log.warning("a chat goes on as it came: %s", error.rule)
                return None
        return self._merge(ids.tolist(), ranges)

    def _merged_text(self, text: str) -> MergedPrompt:
        with self._encoding:
            ids = encode(self._tokenizer, text, None)
        return self._merge(ids, None)

    def _merge(self, ids: list[int], ranges: tuple[tuple[int, int], ...] | None) -> MergedPrompt:
        try:
            merged = self._merger.merge(ids, ranges)
        except UmimError as error:
            _log.warning("a prompt stays raw: %s", error.rule)
            self.metrics.unmerged.inc()
            merged = ids
        self.metrics.raw_tokens.inc(len(ids))
        self.metrics.merged_tokens.inc(len(merged))
        return MergedPrompt(len(ids), merged)

    async def _room(self, request: Request, prompt: MergedPrompt) -> int:
        """Return how many tokens a chat may get that asks for no number; completions get few."""
        most = self._limits.new_tokens
        if self._context is None:
            answer = await self._asked(request, "GET", "/v1/models")
            if answer.status_code != 200:
                return most
            models = _document(answer.content).get("data")
            first = models[0] if isinstance(models, list) and models else {}
            length = first.get("max_model_len") if isinstance(first, dict) else None
            self._context = length if isinstance(length, int) else 0
        return max(1, min(most, self._context - len(prompt.ids))) if self._context else most

    async def _forward(
        self, request: Request, path: str, body: dict[str, Any], translate: Translate | None
    ) -> Response:
        """Send a body to the engine and return its answer, translated where it is one."""
        until = deadline(self._limits)
        answer = await self._asked(request, "POST", path, self._masked(body), until)
        if not answer.is_closed:
            return EventStream(_documents(answer, translate), self._limits, until)
        if answer.status_code != 200 or translate is None:
            return _passed(answer)
        return JSONResponse(translate(_document(answer.content)))

    def _masked(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a request that cannot write the id of a span, whatever bias the client asks.

        llama.cpp takes pairs, too, and adds up those of one id: the client's for spans are left
        out.
        """
        if not self._bias:
            return body
        asked = body.get("logit_bias")
        bias: object
        if asked is None or isinstance(asked, dict):
            bias = {**(asked or {}), **self._bias}
        elif isinstance(asked, list) and all(isinstance(x, list) and len(x) == 2 for x in asked):
            own = [pair for pair in asked if str(pair[0]) not in self._bias]
            bias = [*own, *([int(token), value] for token, value in self._bias.items())]
        else:
            raise ApiError(
                400, "invalid_field", "logit_bias must be an object or a list of pairs",
                type(asked).__name__, "Correct it, or leave it out.", param="logit_bias",
            )  # fmt: skip
        return {**body, "logit_bias": bias}

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
        built = self._client.build_request(method, path, json=body)

        async def answered() -> httpx.Response:
            answer = await self._client.send(built, stream=streamed)
            if streamed and answer.status_code != 200:
                try:
                    await answer.aread()
                finally:
                    await answer.aclose()
            return answer

        try:
            return await unless_gone(request, answered(), until or deadline(self._limits))
        except httpx.PoolTimeout as error:
            rule = f"at most {_CONNECTIONS} requests run"
            raise try_later("overloaded", rule, "more") from error
        except httpx.HTTPError as error:
            raise _broken(type(error).__name__) from error


def _no_address(upstream: str) -> ConfigError:
    return ConfigError(
        "an upstream must be the address of a server", upstream, "Give http://127.0.0.1:8000."
    )


def _broken(value: str) -> ApiError:
    """Return what a failed exchange with the engine means to the client."""
    rule = "the engine behind this gateway must answer"
    return ApiError(502, "upstream_unreachable", rule, value, "Try again later.")


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
            yield part if "error" in part or translate is None else translate(part)
        raise _broken("a stream that ended early")
    except httpx.HTTPError as error:
        raise _broken(type(error).__name__) from error
    finally:
        await answer.aclose()


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Give the lines of a stream; only LF and CRLF end one, while a model may write U+2028."""
    rest = b""
    async for part in answer.aiter_bytes():
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r")
    yield rest


def _document(content: bytes) -> dict[str, Any]:
    """Return a JSON object of the engine's."""
    try:
        document = from_json(content)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise _malformed("the engine must answer with JSON")
    return cast("dict[str, Any]", document)


def _choices(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of a completion of the engine's."""
    choices = part.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
        raise _malformed("the engine's choices must be JSON objects")
    return choices


def _malformed(rule: str) -> ApiError:
    return ApiError(502, "upstream_malformed", rule, "something else")


def _passed(answer: httpx.Response) -> Response:
    """Return an engine's answer as it is."""
    headers = {
        name: value
        for name in ("content-type", "retry-after")
        if (value := answer.headers.get(name)) is not None
    }
    return Response(answer.content, answer.status_code, headers)


def _plain_messages(document: dict[str, Any]) -> list[dict[str, str]] | None:
    """Return the messages of a chat if they are texts and nothing else is wanted; else None."""
    if not document.get("add_generation_prompt", True):
        return None
    if any(document.get(name) for name in _WITH_MESSAGES):
        return None
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        return None
    plain = [_plain_message(message) for message in messages]
    return None if None in plain else cast("list[dict[str, str]]", plain)


def _plain_message(message: object) -> dict[str, str] | None:
    if not isinstance(message, dict) or not set(message) <= _OF_MESSAGES:
        return None
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        content = content[0].get("text") if content[0].get("type") == "text" else None
    if not isinstance(role, str) or not isinstance(content, str):
        return None
    return {"role": role, "content": content}


def _counted(count: object, prompt: MergedPrompt) -> dict[str, Any] | None:
    """Return an engine's count of tokens with those of the prompt before and after merging."""
    if not isinstance(count, dict):
        return None
    both = {"raw_prompt_tokens": prompt.raw, "merged_prompt_tokens": len(prompt.ids)}
    return {**count, "umim": both}


def _chat_logprobs(logprobs: object) -> object:
    """Return a completion's log-probabilities in a chat's form; others stay as they are."""
    if not isinstance(logprobs, dict) or not isinstance(logprobs.get("tokens"), list):
        return logprobs

    def entry(token: str, value: object) -> dict[str, object]:
        return {"token": token, "logprob": value, "bytes": list(token.encode())}

    tokens, values = logprobs["tokens"], logprobs.get("token_logprobs") or []
    best = logprobs.get("top_logprobs") or [None] * len(tokens)
    content = [
        {**entry(token, value), "top_logprobs": [entry(*pair) for pair in (others or {}).items()]}
        for token, value, others in zip(tokens, values, best, strict=False)
    ]
    return {"content": content}
