"""Our own engine behind OpenAI's interface: chats, completions, models, health and metrics."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from umim_core.serving.engine_worker import Event, Failed, Piece, Started
from umim_core.serving.guard import (
    EventStream,
    Limits,
    ServerMetrics,
    deadline,
    guarded,
    merging_wanted,
    read_body,
    unless_gone,
)
from umim_core.serving.openai_api import (
    CHAT,
    COMPLETIONS,
    MODEL,
    MODELS,
    Answer,
    AnyBody,
    ChatBody,
    Choice,
    bad_field,
    read_chat,
    read_completion,
    unknown_model,
    usage,
)
from umim_core.serving.prompt_reader import Lanes


class AnswerEngine(Protocol):
    """One model, in this process or in others.

    Attributes:
        name: How requests call it.
        positions: Most tokens of a prompt and its answer; None for no bound.
        metrics: Counts of its server.
    """

    name: str
    positions: int | None
    metrics: ServerMetrics

    def life(self) -> AbstractAsyncContextManager[None]:
        """Answer requests for the length of a block."""

    async def alive(self) -> bool: ...

    def events(self, body: AnyBody, merging: bool, new_tokens: int) -> AsyncGenerator[Event, None]:
        """Give what happens to a request; see ``LocalEngine``."""


class EngineServer:
    def __init__(self, engine: AnswerEngine, limits: Limits) -> None:
        self.engine, self._limits = engine, limits
        self._began, self._lanes = int(time.time()), Lanes()

    def app(self, token: str | None) -> Starlette:
        """Return the application, for requests with a bearer token; its engine lives with it."""
        routes = [
            Route(CHAT, partial(self._answer, read_chat), methods=["POST"]),
            Route(COMPLETIONS, partial(self._answer, read_completion), methods=["POST"]),
            Route(MODELS, self._models, methods=["GET"]),
            Route(MODEL, self._model, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
        ]
        return guarded(routes, token, self.engine.metrics, lambda app: self.engine.life())

    def _described(self) -> dict[str, Any]:
        return {
            "id": self.engine.name,
            "object": "model",
            "created": self._began,
            "owned_by": "umim",
            "max_model_len": self.engine.positions,
        }

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        if request.path_params["name"] != self.engine.name:
            raise unknown_model(self.engine.name, request.path_params["name"])
        return JSONResponse(self._described())

    async def _health(self, request: Request) -> Response:
        alive = await self.engine.alive()
        return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    async def _answer(self, read: Callable[[bytes], AnyBody], request: Request) -> Response:
        """Answer a request, whole or streamed; what fails before the first token is a 4xx."""
        raw = await read_body(request, self._limits)
        body = await self._lanes.run(len(raw), lambda: read(raw))
        engine, most, until = self.engine, self._limits.new_tokens, deadline(self._limits)
        if body.model not in (None, engine.name):
            raise unknown_model(engine.name, body.model)
        if (body.new_tokens or 0) > most:
            raise bad_field(
                "max_tokens", f"at most {most} tokens may be asked for", body.new_tokens,
                "Ask for fewer, or raise --max-new-tokens.",
            )  # fmt: skip
        answer = Answer(isinstance(body, ChatBody), engine.name)
        events = engine.events(body, merging_wanted(request), most)
        running = _Running(events, engine.metrics, self._limits.report_cached)

        async def until_read() -> dict[str, Any]:
            await running.start()
            return {} if body.stream else await running.whole(answer)

        async with AsyncExitStack() as unanswered:  # an error, or a client that goes, frees the row
            unanswered.push_async_callback(running.events.aclose)
            document = await unless_gone(request, until_read(), until)
            unanswered.pop_all()
        if not body.stream:
            return JSONResponse(document)
        with_usage = body.stream_options.include_usage
        return EventStream(running.stream(answer, with_usage), until)


class _Running:
    """An answer as it comes, counted."""

    def __init__(
        self, events: AsyncGenerator[Event, None], metrics: ServerMetrics, report_cached: bool
    ) -> None:
        self.events, self._metrics, self._began = events, metrics, time.monotonic()
        self._report_cached = report_cached
        self._counts: dict[int, int] = {}

    async def _next(self) -> Started | Piece | None:
        one = await anext(self.events, None)
        if isinstance(one, Failed):
            raise one.error
        return one

    async def start(self) -> None:
        first = await self._next()
        assert isinstance(first, Started)  # noqa: S101  the engine's order
        self._started = first
        self._metrics.raw_tokens.inc(first.raw)
        self._metrics.merged_tokens.inc(first.merged)
        # Others' prompts could be guessed from these: whether a beginning was there before.
        self._cached = first.reused if self._report_cached else 0
        self._metrics.reused_tokens.inc(self._cached)

    async def _pieces(self) -> AsyncIterator[Piece]:
        while (piece := await self._next()) is not None:
            assert isinstance(piece, Piece)  # noqa: S101  the engine's order
            if not self._counts:
                self._metrics.first_token.observe(time.monotonic() - self._began)
            self._metrics.generated_tokens.inc()
            self._counts[piece.index] = piece.generated
            yield piece

    def _usage(self) -> dict[str, Any]:
        read, generated = self._started, sum(self._counts.values())
        return usage(raw=read.raw, merged=read.merged, generated=generated, cached=self._cached)

    async def whole(self, answer: Answer) -> dict[str, Any]:
        texts: dict[int, str] = {}
        ends: dict[int, str | None] = {}
        async for piece in self._pieces():
            texts[piece.index] = texts.get(piece.index, "") + piece.text
            ends[piece.index] = piece.finish
        choices = [Choice(index, texts[index], ends[index]) for index in sorted(texts)]
        return answer.whole(choices, self._usage())

    async def stream(
        self, answer: Answer, with_usage: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        try:
            async for piece in self._pieces():
                if piece.text or piece.finish is not None:
                    yield answer.chunk([Choice(piece.index, piece.text, piece.finish)])
            if with_usage:
                yield answer.chunk([], self._usage())
        finally:
            await self.events.aclose()
