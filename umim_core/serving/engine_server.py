"""Our own engine behind OpenAI's interface: chats, completions, models, health and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from transformers import PreTrainedTokenizerFast

from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.checkpoint.checkpoint_files import default_checkpoint
from umim_core.config.form import Merge
from umim_core.config.generation import PlainOptions
from umim_core.errors import ConfigError, UmimError, require
from umim_core.inference.engine import Engine
from umim_core.inference.options import SAMPLING, GenerateOptions
from umim_core.merging.merged_model import MergedModel
from umim_core.model.umim import UMIM
from umim_core.rules.matcher import PromptIds
from umim_core.serving import guard
from umim_core.serving import openai_api as api
from umim_core.serving.engine_worker import (
    BatchSizes,
    EngineWorker,
    Event,
    Job,
    Piece,
    Started,
)
from umim_core.serving.prompt_reader import Lanes, PromptReader
from umim_core.serving.tool_calls import CallForm, Calls
from umim_core.text.roles import USER, Role

_OPTIONS: Final = {option.name for option in fields(PlainOptions)}


class AnswerEngine(Protocol):
    """One model, in this process or in others.

    Attributes:
        name: How requests call it.
        positions: Most tokens of a prompt and its answer; None for no bound.
        call_form: How the model calls tools; None where that is not known.
        metrics: Counts of its server.
    """

    name: str
    positions: int | None
    call_form: CallForm | None
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
    """One engine behind OpenAI's interface."""

    def __init__(self, engine: AnswerEngine, limits: guard.Limits) -> None:
        super().__init__(engine.metrics, limits)
        self.engine = engine
        self._began, self._lanes = int(time.time()), Lanes()

    def life(self) -> AbstractAsyncContextManager[None]:
        return self.engine.life()

    def _described(self) -> dict[str, Any]:
        return {
            "id": self.engine.name,
            "object": "model",
            "created": self._began,
            "owned_by": "umim",
            "max_model_len": self.engine.positions,
        }

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def model(self, request: Request) -> Response:
        if request.path_params["name"] != self.engine.name:
            raise api.unknown_model(self.engine.name, request.path_params["name"])
        return JSONResponse(self._described())

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
            raise api.bad_field("max_tokens", rule, body.new_tokens, f"Ask for fewer, {remedy}")
        calls = Calls.of(body, self.engine.call_form) if isinstance(body, api.ChatBody) else None
        answer = api.Answer(path == api.CHAT, self.engine.name, calls)
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


@dataclass(frozen=True)
class Served:
    """A model as it is served.

    Attributes:
        name: How requests call it.
        merged_model: The model; without rules it reads raw tokens.
        raw_tail: Last tokens of a prompt, and of each message of a chat, that stay raw.
        roles: Whose contents of a chat merge.
    """

    name: str
    merged_model: MergedModel
    merge: Merge
    raw_tail: int
    roles: tuple[Role, ...] = USER

    @classmethod
    def load(
        cls,
        checkpoint: str | None,
        *,
        base: bool = False,
        name: str | None = None,
        merge: Merge | None = None,
        dtype: str = "auto",
        device: str = "cpu",
    ) -> Served:
        """Load a checkpoint as ``UMIM.from_pretrained`` does, or with ``base`` a plain model.

        It has its own name and merges what it recommends, unless others are given.
        """
        if base:
            if checkpoint is None or merge not in (None, "none"):
                raise ConfigError(
                    "--base serves a model that is named, and merges nothing",
                    f"model {checkpoint}, --merge {merge}",
                    "Name a model, or leave --base out.",
                )
            backbone = load_backbone(checkpoint, dtype=dtype, device=device)
            return cls(name or checkpoint, MergedModel.without_merging(backbone), "none", 0)
        source = checkpoint or default_checkpoint()
        umim = UMIM.from_pretrained(source, dtype=dtype, device=device)
        config = umim.checkpoint.config
        return cls(name or source, umim.merged_model, *config.recommended(merge), config.roles)

    @property
    def backbone(self) -> Backbone:
        return self.merged_model.backbone


class LocalEngine:
    """Answers requests from one batch in this process; see ``AnswerEngine``."""

    def __init__(self, served: Served, sizes: BatchSizes) -> None:
        tokenizer = served.backbone.require_tokenizer()
        fast, kind = isinstance(tokenizer, PreTrainedTokenizerFast), type(tokenizer).__name__
        rule, remedy = "a served model needs a fast tokenizer", "Convert it to a tokenizer.json."
        require(fast, ConfigError, rule, kind, remedy)
        self._served = served
        self.name, self.positions = served.name, served.backbone.max_positions
        self.call_form = CallForm.of(tokenizer)
        self.metrics = guard.ServerMetrics()
        engine = Engine(served.merged_model)
        self.worker = EngineWorker(engine, tokenizer.backend_tokenizer, self.metrics, sizes)
        self._reader = PromptReader(tokenizer, served.roles)

    @asynccontextmanager
    async def life(self) -> AsyncIterator[None]:
        self.worker.start()
        try:
            yield
        finally:
            await run_in_threadpool(self.worker.stop)

    async def alive(self) -> bool:
        return self.worker.alive

    async def events(
        self, body: api.AnyBody, calls: Calls | None, merging: bool, new_tokens: int
    ) -> AsyncGenerator[Event, None]:
        loop, events = asyncio.get_running_loop(), asyncio.Queue[list[Event]]()

        def deliver(new: list[Event]) -> None:
            loop.call_soon_threadsafe(events.put_nowait, new)

        merge: Merge = self._served.merge if merging else "none"
        try:
            prompt = await self._prompt(body, merge, calls)
            options = self._options(body, merge, new_tokens)
            marks = calls.form.shown if calls else frozenset[str]()
            job = Job(prompt, options, body.new_tokens is None, tuple(body.stop), marks, deliver)
            self.worker.submit(job)
        except UmimError as error:
            yield error
            return
        try:
            running = job.options.samples
            while running:
                for event in await events.get():
                    yield event
                    if isinstance(event, UmimError):
                        return
                    running -= isinstance(event, Piece) and event.finish is not None
        finally:
            self.worker.cancel(job)

    def _options(self, body: api.AnyBody, merge: Merge, new_tokens: int) -> GenerateOptions:
        """Sample as OpenAI's, whatever the model's own generation_config says."""
        greedy = body.temperature == 0
        sampled, given = not greedy or (body.n or 1) > 1, dict[str, Any]()
        if sampled:  # greedy search has no n, but a top_k of 1 chooses as it does
            given = {"temperature": 1.0, "top_k": int(greedy), "top_p": 1.0}
        for name in _OPTIONS & type(body).model_fields.keys():
            value = getattr(body, name)
            # Clients give a seed to greedy requests, too.
            if value is not None and not (greedy and name in SAMPLING):
                given[name] = value
        return GenerateOptions(
            max_new_tokens=body.new_tokens or new_tokens,
            do_sample=sampled,
            merge=merge,
            raw_tail=0 if merge == "none" else self._served.raw_tail,
            **given,
        ).of_model(self._served.backbone)

    async def _prompt(self, body: api.AnyBody, merge: Merge, calls: Calls | None) -> PromptIds:
        model = self._served.merged_model
        by_units = merge != "none" and model.unit_positions == "compact"
        most = self.positions and self.positions * (model.longest if by_units else 1)
        prompt = body if isinstance(body, api.ChatBody) else body.prompt
        read = await self._reader.read(prompt, most, calls)
        if merge != "none" and read.unmerged:
            self.metrics.stays_raw("template", read.unmerged)
        return read
