"""Guard in front of a server's routes: bearer token, size and time of bodies, errors, log, metrics.

A log line holds method, path, status, seconds and bytes: nothing of prompts or answers.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from umim_core.errors import UmimError
from umim_core.serving.answers import DONE, event
from umim_core.serving.api_errors import ApiError, api_error
from umim_core.serving.metrics import ServerMetrics

MERGE_HEADER: Final = "x-umim-merge"
_PROMETHEUS: Final = "text/plain; version=0.0.4"
_OPEN: Final = ("/health",)
_LOCAL: Final = ("127.0.0.1", "localhost", "[::1]")
Result = TypeVar("Result")
_log: Final = logging.getLogger("umim.serve")


@dataclass(frozen=True)
class Limits:
    """Bounds of a server.

    Attributes:
        request_bytes: Largest body.
        body_seconds: Until a body must have come.
        answer_seconds: Until an answer must have ended.
        write_seconds: Until a reader must have taken a part of its stream.
        new_tokens: Most tokens of an answer, and the default.
    """

    request_bytes: int = 4 << 20
    body_seconds: float = 30.0
    answer_seconds: float = 600.0
    write_seconds: float = 30.0
    new_tokens: int = 1024


class Guard:
    """Checks requests before an application gets them, and counts its answers.

    Requests must show the bearer token, but for ``/health``. Metrics count other paths together.
    """

    def __init__(
        self, app: ASGIApp, token: str | None, paths: frozenset[str], metrics: ServerMetrics
    ) -> None:
        self._app, self._paths, self._metrics = app, paths, metrics
        self._token = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; see the ASGI specification."""
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
            if path not in _OPEN and not self._known(Headers(scope=scope)):
                refused = ApiError(
                    401, "unauthorized", "requests need the server's bearer token", "none that fits"
                )
                await error_response(refused)(scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
        finally:
            self._metrics.in_flight.dec()
            seconds = time.monotonic() - began
            label = path if path in self._paths else "other"
            status = status or 500  # starlette answers what nobody caught, outside of this
            self._metrics.requests.labels(label, str(status)).inc()
            self._metrics.seconds.labels(label).observe(seconds)
            line = {
                "method": scope["method"],
                "path": label,
                "status": status,
                "seconds": round(seconds, 4),
                "bytes": size,
            }
            _log.info("%s", json.dumps(line))

    def _known(self, headers: Headers) -> bool:
        authorization = headers.get("authorization", "").encode()
        return self._token is None or hmac.compare_digest(authorization, self._token)


async def read_body(request: Request, limits: Limits) -> bytes:
    """Return the body of a request."""
    announced = request.headers.get("content-length", "0")
    size, body = int(announced) if announced.isdecimal() else 0, bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            if size <= limits.request_bytes:
                async for part in request.stream():
                    body += part
                    if len(body) > limits.request_bytes:
                        break
    except TimeoutError:
        raise ApiError(
            408, "slow_body", f"a body must come within {limits.body_seconds:g} s",
            f"{len(body)} bytes", "Send it faster.",
        ) from None  # fmt: skip
    if max(size, len(body)) > limits.request_bytes:
        raise ApiError(
            413, "too_large", f"a body may have {limits.request_bytes} bytes", "more",
            "Shorten the request.",
        )  # fmt: skip
    return bytes(body)


def merging_wanted(request: Request) -> bool:
    """Return whether a request lets its prompt be merged: its header says ``on``, or nothing."""
    said = request.headers.get(MERGE_HEADER, "on").lower()
    if said not in ("on", "off"):
        raise ApiError(400, "invalid_header", f"{MERGE_HEADER} must be on or off", said)
    return said == "on"


def error_response(error: UmimError) -> JSONResponse:
    """Return the answer that reports an error."""
    shown = api_error(error)
    return JSONResponse(shown.document(), shown.status, shown.headers)


async def _answer_error(request: Request, error: Exception) -> JSONResponse:
    """Report an error; starlette's handler."""
    if isinstance(error, UmimError):
        return error_response(error)
    if isinstance(error, HTTPException):
        shown = ApiError(
            error.status_code,
            "unknown_path",
            "path and method must be ones that are served",
            f"{request.method} {request.url.path}",
        )
        return JSONResponse(shown.document(), error.status_code, dict(error.headers or {}))
    return JSONResponse({}, 499)  # the client has gone, nobody reads this


_HANDLED: Final = (UmimError, HTTPException, ClientDisconnect)


def deadline(limits: Limits) -> float:
    """Return when an answer that begins now must have ended, on the event loop's clock."""
    return asyncio.get_running_loop().time() + limits.answer_seconds


def _too_late() -> ApiError:
    return ApiError(
        504, "timeout", "an answer must end in time", "it has not",
        "Ask for fewer tokens, or raise --answer-seconds.",
    )  # fmt: skip


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result], until: float) -> Result:
    """Return what some work gives, and end it when the client goes or it takes too long.

    The body of the request was read before; ``until`` is on the event loop's clock.
    """
    working, watching = asyncio.create_task(work), asyncio.create_task(_gone(request))
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
    life: Callable[[Starlette], AbstractAsyncContextManager[None]],
) -> Starlette:
    """Return an application of routes behind a guard; ``/metrics`` is added.

    Without a bearer token only requests to a name of this machine are answered. ``life`` starts and
    stops with the application.
    """

    async def counted(request: Request) -> Response:
        return Response(metrics.text(), media_type=_PROMETHEUS)

    served = [*routes, Route("/metrics", counted, methods=["GET"])]
    paths = frozenset(route.path for route in served)
    guards = [Middleware(Guard, token=token, paths=paths, metrics=metrics)]
    if token is None:  # a web page could else reach the server by a name that it resolves to it
        guards.append(Middleware(TrustedHostMiddleware, allowed_hosts=_LOCAL))
    handlers: dict[Any, Any] = dict.fromkeys(_HANDLED, _answer_error)
    return Starlette(routes=served, middleware=guards, exception_handlers=handlers, lifespan=life)


class EventStream(StreamingResponse):
    """Server-sent events to a reader that must keep up; an error is the last one.

    The documents are closed in any case; ``until`` is on the event loop's clock.
    """

    media_type = "text/event-stream"

    def __init__(
        self, documents: AsyncGenerator[dict[str, Any], None], limits: Limits, until: float
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self._events(), headers=headers)
        self._documents, self._seconds, self._until = documents, limits.write_seconds, until

    async def _events(self) -> AsyncGenerator[bytes, None]:
        document: dict[str, Any] | None = {}
        while document is not None and "error" not in document:
            try:
                async with asyncio.timeout_at(self._until):
                    document = await anext(self._documents, None)
            except TimeoutError:
                document = _too_late().document()
            except UmimError as error:
                document = api_error(error).document()
            yield DONE if document is None else event(document)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; see the ASGI specification."""

        async def timely(message: Message) -> None:
            async with asyncio.timeout(self._seconds):
                await send(message)

        try:
            await super().__call__(scope, receive, timely)
        except TimeoutError:
            _log.warning("a reader took more than %g s for a part of a stream", self._seconds)
        finally:
            await self._documents.aclose()
