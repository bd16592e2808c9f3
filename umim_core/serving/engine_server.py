"""Our own engine behind OpenAI's interface: chats, completions, models, health and metrics."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from umim_core.errors import UmimError
from umim_core.serving import guard
from umim_core.serving import openai_api as api
from umim_core.serving.local_engine import Event, Started
from umim_core.serving.prompt_reader import Lanes
from umim_core.serving.tool_calls import Calls, Reply


class AnswerEngine(Protocol):
    """One model, in this process or in others."""

    name: str
    positions: int | None  # most tokens of a prompt and its answer; None for no bound
    call_marks: frozenset[str] | None  # ``tool_calls.call_marks``
    metrics: guard.ServerMetrics

    def life(self) -> AbstractAsyncContextManager[None]:
        """Answer requests for the length of a block."""

    async def alive(self) -> bool: ...

    def events(
        self, body: api.AnyBody, calls: Calls | None, merging: bool, new_tokens: int
    ) -> AsyncGenerator[Event, None]:
        """Give what happens to a request, its prompt first; closing it frees the rows.

        ``calls`` are what it says of tools. The answer has at most ``new_tokens`` where it says no
        number.
        """


class EngineServer(guard.ApiServer):
    def __init__(self, engine: AnswerEngine, limits: guard.Limits) -> None:
        super().__init__(engine.metrics, limits)
        self.engine = engine
        self._began, self._lanes = int(time.time()), Lanes()

    def life(self) -> AbstractAsyncContextManager[None]:
        return self.engine.life()

    async def models(self, request: Request) -> Response:
        model: dict[str, Any] = {"id": self.engine.name, "object": "model", "owned_by": "umim"}
        model |= {"created": self._began, "max_model_len": self.engine.positions}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, request: Request) -> Response:
        alive = await self.engine.alive()
        return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    async def answer(self, path: str, request: Request) -> Response:
        """Answer a request, whole or streamed; what fails before the first token is a 4xx."""
        raw = await guard.read_body(request, self.limits)
        body = await self._lanes.run(len(raw), lambda: api.parse_body(path, raw))
        most, until = self.limits.new_tokens, guard.deadline(self.limits.answer_seconds)
        if body.model not in (None, self.engine.name):
            raise api.unknown_model(self.engine.name, body.model)
        if (body.new_tokens or 0) > most:
            rule, remedy = f"at most {most} tokens may be asked for", "or raise --max-new-tokens."
            name = "max_tokens" if body.new_tokens == body.max_tokens else "max_completion_tokens"
            raise api.bad_field(name, rule, body.new_tokens, f"Ask for fewer, {remedy}")
        calls = Calls.of(body, self.engine.call_marks) if isinstance(body, api.ChatBody) else None
        answer = api.Answer(path == api.CHAT, self.engine.name, partial(Reply, calls))
        events = self.engine.events(body, calls, guard.merging_wanted(request), most)
        documents = self._documents(body, events, answer)

        async def begun() -> dict[str, Any]:
            """Return the first document, or the whole answer; an early end frees the rows."""
            document = await anext(documents)
            return document if body.stream else await anext(documents)

        document = await guard.unless_gone(request, begun(), until)
        return guard.EventStream(documents, until) if body.stream else JSONResponse(document)

    async def _documents(
        self, body: api.AnyBody, events: AsyncGenerator[Event, None], answer: api.Answer
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Give {} when the prompt is read, then the chunks of an answer or all of it; count it."""
        metrics, began = self.engine.metrics, time.monotonic()
        read, cached, generated = Started(0, 0, 0), 0, dict[int, int]()
        uncounted = {"usage": None} if body.stream_options.include_usage else {}
        async with aclosing(events):
            async for event in events:
                if isinstance(event, UmimError):
                    raise event
                if isinstance(event, Started):
                    # Others' prompts could be guessed from it: whether their beginning was read.
                    read, cached = event, event.reused if self.limits.report_cached else 0
                    metrics.raw_tokens.inc(read.raw)
                    metrics.merged_tokens.inc(read.merged)
                    metrics.reused_tokens.inc(cached)
                    yield {}
                    continue
                if not generated:
                    metrics.first_token.observe(time.monotonic() - began)
                metrics.generated_tokens.inc()
                generated[event.index] = event.generated
                chunk = answer.chunk([(event.index, event.text, event.finish)])
                (choice,) = chunk["choices"]
                if body.stream and (choice.get("delta") or choice.get("text") or event.finish):
                    yield chunk | uncounted
        count = api.usage(read.raw, read.merged, sum(generated.values()), cached)
        if not body.stream:
            yield answer.whole() | {"usage": count}
        elif uncounted:
            yield answer.chunk([]) | {"usage": count}
