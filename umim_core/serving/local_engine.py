"""Our own engine: a thread runs the rows of all requests in one batch.

    request tasks    submit -> waiting (bounded) ----+
    worker thread    join as rows are free, step, step, ...
    request tasks    <- events: started, pieces, ended or failed

A request may be cancelled at any time: its rows leave before the next forward. What the model
raises on purpose fails one request, as does a prompt that memory has no room for. A forward of
the batch that memory has no room for fails the requests that run; those that wait go on. Anything
else ends the worker, fails all of them and shows in ``runs``.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import islice
from threading import Condition, Thread
from typing import Any, Final

import torch
from starlette.concurrency import run_in_threadpool
from transformers import PreTrainedTokenizerFast

from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.checkpoint.checkpoint_files import default_checkpoint
from umim_core.config.form import Merge
from umim_core.config.generation import PlainOptions
from umim_core.errors import ConfigError, UmimError, require
from umim_core.inference.batch import Batch
from umim_core.inference.engine import Engine
from umim_core.inference.options import SAMPLING, GenerateOptions
from umim_core.inference.outputs import Row
from umim_core.inference.prefix_store import PrefixStore
from umim_core.merging.merged_model import MergedModel
from umim_core.model.umim import UMIM
from umim_core.rules.matcher import PromptIds
from umim_core.serving import openai_api as api
from umim_core.serving.guard import ServerMetrics
from umim_core.serving.prompt_reader import PromptReader
from umim_core.serving.tool_calls import Calls, call_marks
from umim_core.text.roles import USER, Role
from umim_core.text.text_stream import TextStream

_OPTIONS: Final = {option.name for option in fields(PlainOptions)}
_JOINED_TOKENS: Final = 512  # raw prompt tokens read between two forwards of the rows that run
_OVERTAKING: Final = 16  # smaller requests that may pass one for which too few rows are free
_log: Final = logging.getLogger("umim.serve")


@dataclass(frozen=True)
class Started:
    """A prompt of raw tokens was read as merged units; reused ones were not evaluated again."""

    raw: int
    merged: int
    reused: int


@dataclass(frozen=True)
class Piece:
    """Text of an answer, and why it ended; None if it goes on."""

    index: int
    text: str
    finish: str | None
    generated: int


Event = Started | Piece | UmimError


@dataclass(eq=False)
class Job:
    prompt: PromptIds
    options: GenerateOptions  # those of the model filled in
    shorten: bool  # whether fewer tokens will do where the context has no room for as many
    stops: tuple[str, ...]
    marks: frozenset[str]  # special tokens that are shown
    deliver: Callable[[list[Event]], None]  # called in the worker's thread, once a forward
    cancelled: bool = False  # set by whoever no longer wants the answer
    overtaken: int = 0  # smaller requests that began before it and came after it
    _texts: list[tuple[int, Row, TextStream]] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class BatchSizes:
    max_rows: int = 16
    max_waiting: int = 256  # requests that may wait for a row
    kept_bytes: int = 1 << 30  # of columns that are kept for prompts that begin alike


@dataclass(frozen=True)
class Served:
    name: str
    merged_model: MergedModel  # without rules it reads raw tokens
    merge: Merge
    raw_tail: int  # of a prompt, and of each message of a chat
    roles: tuple[Role, ...] = USER  # whose contents of a chat merge

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
                rule = "--base serves a model that is named, and merges nothing"
                remedy = "Name a model, or leave --base out."
                raise ConfigError(rule, f"model {checkpoint}, --merge {merge}", remedy)
            backbone = load_backbone(checkpoint, dtype=dtype, device=device)
            return cls(name or checkpoint, MergedModel.without_merging(backbone), "none", 0)
        source = default_checkpoint() if checkpoint is None else checkpoint
        umim = UMIM.from_pretrained(source, dtype=dtype, device=device)
        config = umim.checkpoint.config
        return cls(name or source, umim.merged_model, *config.recommended(merge), config.roles)

    @property
    def backbone(self) -> Backbone:
        return self.merged_model.backbone


class LocalEngine:
    """Answers requests from one batch in a thread of this process; see ``AnswerEngine``.

    Metrics show the rows that run and requests that wait.
    """

    def __init__(self, served: Served, sizes: BatchSizes) -> None:
        tokenizer = served.backbone.require_tokenizer()
        fast, kind = isinstance(tokenizer, PreTrainedTokenizerFast), type(tokenizer).__name__
        rule, remedy = "a served model needs a fast tokenizer", "Convert it to a tokenizer.json."
        require(fast, ConfigError, rule, kind, remedy)
        self.name, self.positions = served.name, served.backbone.max_positions
        self.call_marks, self.metrics = call_marks(tokenizer), ServerMetrics()
        self._served, self._sizes = served, sizes
        # No request could do what the model's own settings name and no option changes.
        for temperature in (0, None):
            body = api.CompletionBody(prompt="", temperature=temperature)
            self._options(body, served.merge, 1).check(served.merged_model, 1)
        self._reader = PromptReader(tokenizer, served.roles)
        core = tokenizer.backend_tokenizer
        self._decode = partial(core.decode, skip_special_tokens=True)
        added = core.get_added_tokens_decoder()
        self._special = {number: token.content for number, token in added.items() if token.special}
        self._batch = Batch(Engine(served.merged_model), PrefixStore(sizes.kept_bytes))
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._changed, self._stopping = Condition(), False
        self.metrics.running.set_function(lambda: len(self._batch.rows))
        self.metrics.waiting.set_function(lambda: len(self._waiting))
        self._thread = Thread(target=self._run, name="umim-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @asynccontextmanager
    async def life(self) -> AsyncIterator[None]:
        """Run for the length of a block; what is left then fails."""
        self.start()
        try:
            yield
        finally:
            with self._changed:
                self._stopping = True
                self._changed.notify()
            await run_in_threadpool(self._thread.join)

    @property
    def runs(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    async def alive(self) -> bool:
        return self.runs

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
            marks = calls.marks if calls else frozenset[str]()
            job = Job(prompt, options, body.new_tokens is None, tuple(body.stop), marks, deliver)
            self._submit(job)
        except UmimError as error:
            yield error
            return
        running = options.samples
        try:
            while running:
                for event in await events.get():
                    yield event
                    if isinstance(event, UmimError):
                        return
                    running -= isinstance(event, Piece) and event.finish is not None
        finally:  # its rows leave before the next forward; one that has ended stays as it is
            with self._changed:
                job.cancelled = True
                self._changed.notify()

    def _options(self, body: api.AnyBody, merge: Merge, new_tokens: int) -> GenerateOptions:
        """Sample as OpenAI's, whatever the model's own generation_config says."""
        greedy = body.temperature == 0
        sampled, given = not greedy or (body.n or 1) > 1, dict[str, Any](n=1)
        if sampled:  # greedy search has no n, but a top_k of 1 chooses as it does
            given |= {"temperature": 1.0, "top_k": int(greedy), "top_p": 1.0}
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

    def _submit(self, job: Job) -> None:
        most = self._sizes.max_rows
        if job.options.samples > most:
            rule, remedy = f"n must be at most {most}", "Ask for fewer, or raise --max-rows."
            raise api.bad_field("n", rule, job.options.samples, remedy)
        with self._changed:
            if not self.runs:
                raise _ended()
            if len(self._waiting) >= self._sizes.max_waiting:
                rule = f"at most {self._sizes.max_waiting} requests may wait"
                raise api.try_later("overloaded", rule, len(self._waiting))
            self._waiting.append(job)
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._admit():
                try:
                    self._step()
                except (MemoryError, RuntimeError) as error:
                    if not _out_of_memory(error):
                        raise
                    self._drop()
        finally:
            with self._changed:
                self._stopping = True
                left = [*self._running, *self._waiting]
                self._waiting.clear()
            for job in left:
                job.deliver([_ended()])
            _log.info("engine stopped, %d requests failed", len(left))

    def _admit(self) -> bool:
        """Let requests join as rows are free; wait while there is none. False: stop."""
        tokens = 0
        while tokens < _JOINED_TOKENS:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stopping or bool(self._waiting or self._running)
                )
                if self._stopping:
                    return False
                for gone in [job for job in self._waiting if job.cancelled]:
                    self._waiting.remove(gone)
                job = self._next(self._sizes.max_rows - len(self._batch.rows))
                if job is None:
                    return True
                self._waiting.remove(job)
                self._running.append(job)
            tokens += self._join(job)
        return True

    def _next(self, free: int) -> Job | None:
        """Return the first request that the free rows are enough for.

        It may pass others that need more rows, unless one of them was passed too often: then rows
        stay free until there are enough for that one.
        """
        for place, job in enumerate(self._waiting):
            if job.options.samples <= free:
                for passed in islice(self._waiting, place):
                    passed.overtaken += 1
                return job
            if job.overtaken >= _OVERTAKING:
                return None
        return None

    def _join(self, job: Job) -> int:
        """Read a prompt; return how many tokens it had."""
        try:
            rows = self._batch.join([job.prompt], job.options, shorten=job.shorten)
        except UmimError as error:
            self._fail(job, error)
            return 0
        except (MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            self._batch.forget()
            self._fail(job, _no_memory(f"a prompt of {len(job.prompt.ids)} tokens"))
            return 0
        first = rows[0]
        job._texts = [
            (number, row, TextStream(self._decode, self._special, job.stops, job.marks))
            for number, row in enumerate(rows)
        ]
        job.deliver([Started(first.prompt_length, first.prompt_units, first.reused)])
        return first.prompt_length

    def _step(self) -> None:
        """Take a token for each row and hand its text over."""
        for job in [job for job in self._running if job.cancelled]:
            self._end(job)
        if not self._batch.rows:
            return
        self._batch.step()
        for job in list(self._running):
            events = [self._event(job, *text) for text in list(job._texts)]
            failed = any(isinstance(event, UmimError) for event in events)
            if failed or not job._texts:
                self._end(job)
            job.deliver(events)

    def _event(self, job: Job, index: int, row: Row, stream: TextStream) -> Event:
        if row.error is not None:
            return row.error
        text = stream.push(row.raw[-1])
        if not row.running:
            text += stream.finish()
        finish = None
        if stream.stopped or not row.running:
            finish = "length" if row.stop_reason == "length" and not stream.stopped else "stop"
            self._batch.leave([row])
            job._texts = [text for text in job._texts if text[0] != index]
        return Piece(index, text, finish, row.generated)

    def _drop(self) -> None:
        """Fail all requests that run: a forward that broke off left their columns undefined."""
        rows, jobs = len(self._batch.rows), list(self._running)
        self._batch.drop()
        for job in jobs:  # an error each: what catches one writes its traceback into it
            self._fail(job, _no_memory(f"{rows} rows"))
        _log.warning("out of memory, %d requests failed", len(jobs))

    def _fail(self, job: Job, error: UmimError) -> None:
        self._end(job)
        job.deliver([error])

    def _end(self, job: Job) -> None:
        self._batch.leave([row for _, row, _ in job._texts])
        job._texts.clear()
        self._running.remove(job)


def _out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Return whether there was no memory; torch has no type of its own for it on a CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(text in str(error) for text in ("DefaultCPUAllocator", "STATUS_ALLOC_FAILED"))


def _no_memory(needed: str) -> api.ApiError:
    return api.try_later("out_of_memory", "the memory must have room for what runs", needed)


def _ended() -> api.ApiError:
    return api.try_later("unavailable", "the engine must run", "it has stopped")
