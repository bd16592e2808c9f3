"""Guard in front of a server's routes: who may ask, size and time of bodies, errors, log, metrics.

A log line holds method, path, status, seconds and bytes: nothing of prompts or answers.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from umim_core.errors import UmimError
from umim_core.serving import openai_api as api

MERGE_HEADER: Final = "x-umim-merge"
_PROMETHEUS: Final = "text/plain; version=0.0.4"
_OPEN: Final = ("/health",)
_LOCAL: Final = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d*)?")
_BODY_SECONDS: Final = 30  # until a body must have come
_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
Result = TypeVar("Result")
_log: Final = logging.getLogger("umim.serve")


@dataclass(frozen=True)
class Limits:
    request_bytes: int = 4 << 20  # of a body
    answer_seconds: float = 600.0  # until an answer must have ended
    new_tokens: int = 1024  # most tokens of an answer, and the default
    report_cached: bool = False  # whether clients learn how much of their prompts was reused


class ServerMetrics:
    """Counters of one server, for Prometheus; each one's text says what it counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="umim", registry=self.registry)
        gauge = partial(Gauge, namespace="umim", registry=self.registry)
        histogram = partial(Histogram, namespace="umim", registry=self.registry, buckets=_SECONDS)
        self.requests = counter("requests", "Answered requests.", ("path", "status"))
        self.seconds = histogram("request_seconds", "From a request's head to its end.", ["path"])
        self.first_token = histogram("first_token_seconds", "From a body to the first token.")
        self.in_flight = gauge("requests_in_flight", "Requests that are being answered.")
        self.running = gauge("rows_running", "Rows that run in this process.")
        self.waiting = gauge("requests_waiting", "Requests that wait for a row.")
        self.raw_tokens = counter("prompt_tokens_raw", "Prompt tokens.")
        self.merged_tokens = counter("prompt_tokens_merged", "Prompt units after merging.")
        self.reused_tokens = counter(
            "prompt_tokens_reused", "Prompt units not evaluated again, with --report-cached-tokens."
        )
        self.generated_tokens = counter("generated_tokens", "Generated tokens.")
        self.unmerged = counter("prompts_unmerged", "Prompts that stayed raw, and why.", ["reason"])

    def stays_raw(self, reason: str, rule: str) -> None:
        """Count and log a prompt that was to be merged and is not."""
        self.unmerged.labels(reason).inc()
        _log.warning("a prompt stays raw (%s): %s", reason, rule)


class Guard:
    """Checks requests before an application gets them, and counts its answers.

    With a token, requests must show it, but for ``/health``: no web page can. Without one, requests
    are refused that ask for another host than this machine, whose name a web page may resolve to
    it, and those of web pages of other sites. Metrics count unknown paths together.
    """

    def __init__(
        self, app: ASGIApp, token: str | None, paths: frozenset[str], metrics: ServerMetrics
    ) -> None:
        self._app, self._paths, self._metrics = app, paths, metrics
        self._tokens: list[bytes] = []  # as clients of UTF-8 and of Latin-1 write it
        if token is not None:
            latin = token.encode("latin-1", "ignore")
            self._tokens = [os.fsencode(token), latin if len(latin) == len(token) else b""]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, size = time.monotonic(), 0, 0

        async def counted(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                size += len(message.get("body", b""))
            await send(message)

        path = scope["path"]
        self._metrics.in_flight.inc()
        try:
            refused = self._refused(path, Headers(scope=scope))
            app = self._app if refused is None else error_response(refused)
            await app(scope, receive, counted)
        finally:
            self._metrics.in_flight.dec()
            seconds = time.monotonic() - began
            path = api.MODELS if path.startswith(api.MODELS + "/") else path
            label = path if path in self._paths else "other"
            status = status or 500  # starlette answers what nobody caught, outside of this
            self._metrics.requests.labels(label, str(status)).inc()
            self._metrics.seconds.labels(label).observe(seconds)
            line = {"method": scope["method"], "path": label, "status": status}
            _log.info("%s", json.dumps(line | {"seconds": round(seconds, 4), "bytes": size}))

    def _refused(self, path: str, headers: Headers) -> api.ApiError | None:
        if self._tokens:
            given = [value for name, value in headers.raw if name == b"authorization"]
            scheme, _, value = (given[0] if len(given) == 1 else b"").partition(b" ")
            fits = [hmac.compare_digest(value.strip(), token) for token in self._tokens]
            known = scheme.lower() == b"bearer" and value.strip() and any(fits)
            rule = "requests need the server's bearer token"
            fine = known or path in _OPEN
            remedy = "Send it in the header: Authorization: Bearer TOKEN."
            refused = api.ApiError(401, "unauthorized", rule, "none that fits", remedy)
            return None if fine else refused
        host = headers.get("host", "").lower()
        remedy = "Name a token by --api-key-env."
        if not _LOCAL.fullmatch(host):
            rule = "without a token the host must be 127.0.0.1, localhost or [::1]"
            return api.ApiError(400, "unknown_host", rule, "another one", remedy)
        sites = {site.strip().lower() for site in headers.getlist("sec-fetch-site")}
        origins = {origin.lower().partition("://")[2] for origin in headers.getlist("origin")}
        if origins <= {host} and sites <= {"same-origin", "none"}:
            return None
        rule = "web pages of other sites may not use a server without a token"
        found = "an Origin or Sec-Fetch-Site of another site"
        return api.ApiError(403, "cross_site", rule, found, remedy)


async def read_body(request: Request, limits: Limits) -> bytes:
    announced = request.headers.get("content-length", "0")
    size, body = int(announced) if announced.isdecimal() else 0, bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            if size <= limits.request_bytes:
                async for part in request.stream():
                    body += part
                    if len(body) > limits.request_bytes:
                        break
    except TimeoutError:
        rule, found = f"a body must come within {_BODY_SECONDS} s", f"{len(body)} bytes"
        raise api.ApiError(408, "slow_body", rule, found, "Send it faster.") from None
    if max(size, len(body)) > limits.request_bytes:
        rule = f"a body may have {limits.request_bytes} bytes"
        raise api.ApiError(413, "too_large", rule, "more", "Shorten the request.")
    return bytes(body)


def merging_wanted(request: Request) -> bool:
    """Return whether a request lets its prompt be merged: its header says ``on``, or nothing."""
    said = request.headers.get(MERGE_HEADER, "on").lower()
    if said not in ("on", "off"):
        rule, remedy = f"{MERGE_HEADER} must be on or off", "Correct it, or leave it out."
        raise api.ApiError(400, "invalid_header", rule, said, remedy)
    return said == "on"


def error_response(error: UmimError) -> JSONResponse:
    shown = api.api_error(error)
    return JSONResponse(shown.document(), shown.status, shown.headers)


async def _answer_error(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, UmimError):
        return error_response(error)
    if isinstance(error, HTTPException):
        code = "method_not_allowed" if error.status_code == 405 else "unknown_path"
        rule = "path and method must be ones that are served"
        found = f"{request.method} {request.url.path}"
        remedy = f"Send POST to {api.CHAT} or {api.COMPLETIONS}, GET to {api.MODELS} or /health."
        shown = api.ApiError(error.status_code, code, rule, found, remedy)
        return JSONResponse(shown.document(), error.status_code, dict(error.headers or {}))
    return JSONResponse({}, 499)  # the client has gone, nobody reads this


_HANDLED: Final = (UmimError, HTTPException, ClientDisconnect)


def deadline(seconds: float) -> float:
    """Return when something that begins now must have ended, on the event loop's clock."""
    return asyncio.get_running_loop().time() + seconds


def _too_late() -> api.ApiError:
    rule, remedy = "an answer must end in time", "Ask for fewer tokens, or raise --answer-seconds."
    return api.ApiError(504, "timeout", rule, "it has not", remedy)


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result], until: float) -> Result:
    """Return what some work gives, and end it when the client goes or it takes too long.

    The body of the request was read before; ``until`` is on the event loop's clock.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.create_task(work), asyncio.create_task(gone())
    left = until - asyncio.get_running_loop().time()
    try:
        await asyncio.wait({working, watching}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect if watching.done() else _too_late()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def guarded(
    routes: Sequence[Route],
    token: str | None,
    metrics: ServerMetrics,
    life: Callable[[Starlette], AbstractAsyncContextManager[None]] | None = None,
) -> Starlette:
    """Return an application of routes behind a guard, and of ``/metrics``; both live together."""

    async def counted(request: Request) -> Response:
        return Response(generate_latest(metrics.registry), media_type=_PROMETHEUS)

    served = [*routes, Route("/metrics", counted, methods=["GET"])]
    paths = frozenset(route.path for route in served)
    guards = [Middleware(Guard, token=token, paths=paths, metrics=metrics)]
    handlers: dict[Any, Any] = dict.fromkeys(_HANDLED, _answer_error)
    return Starlette(routes=served, middleware=guards, exception_handlers=handlers, lifespan=life)


class ApiServer(ABC):
    """The paths of OpenAI's interface, guarded; a subclass says what answers them."""

    def __init__(self, metrics: ServerMetrics, limits: Limits) -> None:
        self.metrics, self.limits = metrics, limits

    def app(self, token: str | None) -> Starlette:
        """Return the application, for requests with a bearer token; its engine lives with it."""
        routes = [
            Route(api.CHAT, partial(self.answer, api.CHAT), methods=["POST"]),
            Route(api.COMPLETIONS, partial(self.answer, api.COMPLETIONS), methods=["POST"]),
            Route(api.MODELS, self.models, methods=["GET"]),
            Route(api.MODEL, self.model, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
        ]
        return guarded(routes, token, self.metrics, lambda app: self.life())

    @abstractmethod
    def life(self) -> AbstractAsyncContextManager[None]:
        """Answer requests for the length of a block."""

    @abstractmethod
    async def answer(self, path: str, request: Request) -> Response:
        """Answer a chat or a completion, whole or streamed."""

    @abstractmethod
    async def models(self, request: Request) -> Response:
        """List the models; with status 200 as OpenAI's interface does."""

    async def model(self, request: Request) -> Response:
        """Describe one of the models; not all engines behind a gateway have such a path."""
        listed = await self.models(request)
        if listed.status_code != 200:
            return listed
        entries = json.loads(bytes(listed.body))["data"]  # of an engine behind: any JSON
        models = {one["id"]: one for one in entries if isinstance(one.get("id"), str)}
        if (name := request.path_params["name"]) not in models:
            raise api.unknown_model(" or ".join(models), name)
        return JSONResponse(models[name])

    @abstractmethod
    async def health(self, request: Request) -> Response: ...


class EventStream(StreamingResponse):
    """Server-sent events; an error is the last one.

    The documents are closed in any case; ``until`` is on the event loop's clock.
    """

    media_type = "text/event-stream"

    def __init__(self, documents: AsyncGenerator[dict[str, Any], None], until: float) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self._events(), headers=headers)
        self._documents, self._until = documents, until

    async def _events(self) -> AsyncGenerator[bytes, None]:
        document: dict[str, Any] | None = {}
        while document is not None and not document.get("error"):
            try:
                async with asyncio.timeout_at(self._until):
                    document = await anext(self._documents, None)
            except TimeoutError:
                document = _too_late().document()
            except UmimError as error:
                document = api.api_error(error).document()
            yield api.DONE if document is None else api.event(document)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._documents.aclose()
