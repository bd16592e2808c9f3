"""Our own engine behind OpenAI's interface: chats, completions, models, health and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, cast

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import PreTrainedTokenizerFast

from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.checkpoint.default_checkpoint import default_checkpoint
from umim_core.config.form import Merge
from umim_core.errors import ConfigError, UmimError
from umim_core.inference.engine import Engine
from umim_core.inference.prompts import TokenPrompt
from umim_core.merging.compressed import Compressed
from umim_core.model import options as generate_options
from umim_core.model.inputs import encode_prompts, prompt_items
from umim_core.model.options import GenerateOptions
from umim_core.model.umim import UMIM
from umim_core.serving.answers import DONE, Answer, Choice, event, usage
from umim_core.serving.api_bodies import ChatBody, CompletionBody, read_chat, read_completion
from umim_core.serving.api_errors import ApiError, api_error
from umim_core.serving.engine_worker import EngineWorker, Event, Failed, Job, Piece, Started
from umim_core.serving.guard import (
    EventStream,
    Limits,
    guarded,
    merging_wanted,
    read_body,
    unless_gone,
)
from umim_core.serving.metrics import ServerMetrics


@dataclass(frozen=True)
class Served:
    """A model as it is served.

    Attributes:
        name: How requests call it.
        compressed: The model; without rules it reads raw tokens.
        merge: What is merged.
        raw_tail: Last tokens of a prompt, and of each message of a chat, that stay raw.
    """

    name: str
    compressed: Compressed
    merge: Merge
    raw_tail: int

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
        """Load what is served.

        Args:
            checkpoint: A checkpoint as of ``UMIM.from_pretrained``; with ``base`` a plain model.
            base: Whether it is a plain model, of which nothing is merged.
            name: How requests call it; by default its own name.
            merge: What is merged; by default what the checkpoint recommends.
            dtype: Data type of the backbone, as of ``load_backbone``.
            device: A torch device.

        Raises:
            ConfigError: If a plain model is not named or is to be merged.
            CheckpointError: As ``UMIM.from_pretrained``; so are ``BackboneError`` and others.
        """
        if base:
            if checkpoint is None or merge not in (None, "none"):
                raise ConfigError(
                    "--base serves a model that is named, and merges nothing",
                    f"model {checkpoint}, --merge {merge}",
                    "Name a model, or leave --base out.",
                )
            backbone = load_backbone(checkpoint, dtype=dtype, device=device)
            return cls(name or checkpoint, Compressed.without_merging(backbone), "none", 0)
        found = checkpoint or default_checkpoint()
        umim = UMIM.from_pretrained(found, dtype=dtype, device=device)
        return cls(name or found, umim.compressed, *umim.checkpoint.config.recommended(merge))

    @property
    def backbone(self) -> Backbone:
        """The frozen model."""
        return self.compressed.backbone


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of the worker's batch; see ``EngineWorker``."""

    max_rows: int = 16
    max_waiting: int = 256
    kept_bytes: int = 1 << 30


class EngineServer:
    """The routes of one served model.

    Args:
        served: The model.
        limits: Bounds of requests.
        sizes: Sizes of its batch.

    Raises:
        ConfigError: If its tokenizer cannot decode a stream.
    """

    def __init__(self, served: Served, limits: Limits, sizes: BatchSizes) -> None:
        tokenizer = served.backbone.require_tokenizer()
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ConfigError(
                "a served model needs a fast tokenizer",
                type(tokenizer).__name__,
                "Convert it to a tokenizer.json.",
            )
        self._served, self._limits = served, limits
        self.metrics = ServerMetrics()
        self.worker = EngineWorker(
            Engine(served.compressed),
            tokenizer.backend_tokenizer,
            self.metrics,
            max_rows=sizes.max_rows,
            max_waiting=sizes.max_waiting,
            kept_bytes=sizes.kept_bytes,
        )
        self._encoding = Lock()  # a tokenizer's settings are not for two threads
        self._began = int(time.time())

    def app(self, token: str | None) -> Starlette:
        """Return the application; its worker starts and stops with it.

        Args:
            token: Bearer token that requests must show; None for none.
        """
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._completion, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
        ]
        return guarded(routes, token, self.metrics, self._life)

    @asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        self.worker.start()
        yield
        await run_in_threadpool(self.worker.stop)

    async def _models(self, request: Request) -> Response:
        model = {
            "id": self._served.name,
            "object": "model",
            "created": self._began,
            "owned_by": "umim",
            "max_model_len": self._served.backbone.max_positions,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self, request: Request) -> Response:
        alive = self.worker.alive
        return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, read_chat(await read_body(request, self._limits)))

    async def _completion(self, request: Request) -> Response:
        return await self._answer(request, read_completion(await read_body(request, self._limits)))

    async def _answer(self, request: Request, body: ChatBody | CompletionBody) -> Response:
        """Answer a checked body, whole or streamed; what fails before the first token is a 4xx."""
        began, name = time.monotonic(), self._served.name
        if body.model not in (None, name):
            raise ApiError(
                404, "model_not_found", "the model must be the one that is served", body.model,
                f"Ask for {name}.", param="model",
            )  # fmt: skip
        job, events = await run_in_threadpool(
            self._job, body, merging_wanted(request), asyncio.get_running_loop()
        )
        self.worker.submit(job)
        answer = Answer(isinstance(body, ChatBody), name)
        running = _Running(
            self.worker, job, events, began + self._limits.answer_seconds,
            lambda: self.metrics.first_token.observe(time.monotonic() - began),
        )  # fmt: skip

        async def until_read() -> tuple[Started, dict[str, Any]]:
            started = await running.started()
            return started, {} if body.stream else await running.whole(answer, started)

        with ExitStack() as unanswered:  # an error, or a client that goes, frees the row
            unanswered.callback(self.worker.cancel, job)
            started, document = await unless_gone(request, until_read())
            unanswered.pop_all()
        if not body.stream:
            return JSONResponse(document)
        return EventStream(running.stream(answer, started, body.usage_wanted), self._limits)

    def _job(
        self,
        body: ChatBody | CompletionBody,
        merging: bool,
        loop: asyncio.AbstractEventLoop,
    ) -> tuple[Job, asyncio.Queue[Event]]:
        """Translate a body for the worker."""
        options = self._options(body, merging)
        config = generate_options.generation_config(options, self._served.backbone)
        events: asyncio.Queue[Event] = asyncio.Queue()

        def put(new: list[Event]) -> None:
            for one in new:
                events.put_nowait(one)

        job = Job(
            self._encoded(body),
            config,
            generate_options.request(options),
            body.new_tokens is None,
            body.stops,
            lambda new: cast("None", loop.call_soon_threadsafe(put, new)),
        )
        return job, events

    def _options(self, body: ChatBody | CompletionBody, merging: bool) -> GenerateOptions:
        most, wanted = self._limits.new_tokens, body.new_tokens
        if wanted is not None and wanted > most:
            raise ApiError(
                400, "invalid_field", f"at most {most} tokens may be asked for", wanted,
                "Ask for fewer, or raise --max-new-tokens.", param="max_tokens",
            )  # fmt: skip
        options: dict[str, Any] = {"max_new_tokens": most if wanted is None else wanted}
        if body.temperature == 0:
            options["do_sample"] = False
        else:  # as OpenAI's, whatever the model's own generation_config says
            options |= {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
            given = {"temperature": body.temperature, "top_p": body.top_p}
            options |= {key: value for key, value in given.items() if value is not None}
        if body.n not in (None, 1):
            options["n"] = body.n
        if body.seed is not None:
            options["seed"] = body.seed
        merge = self._served.merge if merging else "none"
        options |= {"merge": merge, "raw_tail": 0 if merge == "none" else self._served.raw_tail}
        return cast("GenerateOptions", options)

    def _encoded(self, body: ChatBody | CompletionBody) -> TokenPrompt:
        given: Any = (
            [message.plain() for message in body.messages]
            if isinstance(body, ChatBody)
            else body.prompt
        )
        with self._encoding:
            return encode_prompts(prompt_items(given), self._served.backbone, None)[0]


class _Running:
    """A request that the worker has, seen from the event loop."""

    def __init__(
        self,
        worker: EngineWorker,
        job: Job,
        events: asyncio.Queue[Event],
        deadline: float,
        at_first: Callable[[], None],
    ) -> None:
        self._worker, self._job, self._events, self._at_first = worker, job, events, at_first
        self._deadline = deadline - time.monotonic() + asyncio.get_running_loop().time()
        self._left = set(range(job.samples))
        self._counts = [0] * job.samples

    async def _next(self) -> Started | Piece:
        try:
            async with asyncio.timeout_at(self._deadline):
                got = await self._events.get()
        except TimeoutError:
            raise ApiError(
                504, "timeout", "an answer must end in time", "it has not",
                "Ask for fewer tokens, or raise --answer-seconds.",
            ) from None  # fmt: skip
        if isinstance(got, Failed):
            raise got.error
        return got

    async def started(self) -> Started:
        """Wait until the prompt was read."""
        first = await self._next()
        assert isinstance(first, Started)  # noqa: S101  the worker's order
        return first

    async def pieces(self) -> AsyncIterator[Piece]:
        """Give what is generated, until all answers have ended."""
        first = True
        while self._left:
            piece = await self._next()
            assert isinstance(piece, Piece)  # noqa: S101  the worker's order
            if first:
                first = False
                self._at_first()
            self._counts[piece.index] = piece.generated
            if piece.finish is not None:
                self._left.remove(piece.index)
            yield piece

    def _usage(self, started: Started) -> dict[str, Any]:
        return usage(
            raw=started.raw,
            merged=started.merged,
            generated=sum(self._counts),
            cached=started.reused,
        )

    async def whole(self, answer: Answer, started: Started) -> dict[str, Any]:
        """Return the whole answer."""
        texts, ends = [""] * self._job.samples, [""] * self._job.samples
        async for piece in self.pieces():
            texts[piece.index] += piece.text
            ends[piece.index] = piece.finish or ""
        choices = [Choice(b, *pair) for b, pair in enumerate(zip(texts, ends, strict=True))]
        return answer.whole(choices, self._usage(started))

    async def stream(
        self, answer: Answer, started: Started, with_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        """Give the answer as events; an error is the last one."""
        try:
            async for piece in self.pieces():
                if piece.text or piece.finish is not None:
                    choice = Choice(piece.index, piece.text, piece.finish)
                    yield event(answer.chunk([choice]))
            if with_usage:
                yield event(answer.chunk([], self._usage(started)))
            yield DONE
        except UmimError as error:
            yield event(api_error(error).document())
        finally:
            self._worker.cancel(self._job)
