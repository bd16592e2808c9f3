"""Worker thread that runs the rows of all requests in one batch.

    request threads    submit -> waiting (bounded) ----+
    worker thread      join as rows are free, step, step, ...
    request threads    <- events: started, pieces, ended or failed

A request may be cancelled at any time: its rows leave before the next forward. What the model
raises on purpose fails one request, as does a prompt that memory has no room for. A forward of
the batch that memory has no room for fails the requests that run; those that wait go on. Anything
else ends the worker, fails all of them and shows in ``alive``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from threading import Condition, Thread
from typing import Final

import torch
from tokenizers import Tokenizer

from umim_core.errors import UmimError
from umim_core.inference.batch import Batch
from umim_core.inference.engine import Engine
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import Row
from umim_core.inference.prefix_store import PrefixStore
from umim_core.rules.matcher import PromptIds
from umim_core.serving.guard import ServerMetrics
from umim_core.serving.openai_api import ApiError, bad_field, try_later
from umim_core.text.text_stream import TextStream

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
    """One request.

    Attributes:
        prompt: Raw ids, with the parts that may merge.
        options: What ``GenerateOptions.of_model`` returns.
        marks: Special tokens that are shown.
        shorten: Whether fewer tokens will do where the context has no room for as many.
        deliver: Called in the worker's thread with the events of a forward.
        cancelled: Set by whoever no longer wants the answer.
        overtaken: How many smaller requests began before it that came after it.
    """

    prompt: PromptIds
    options: GenerateOptions
    shorten: bool
    stops: tuple[str, ...]
    marks: frozenset[str]
    deliver: Callable[[list[Event]], None]
    cancelled: bool = False
    overtaken: int = 0
    _texts: list[tuple[int, Row, TextStream]] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of a worker's batch.

    Attributes:
        max_rows: Rows that run at once.
        max_waiting: Requests that may wait for a row.
        kept_bytes: Bytes of columns that are kept for prompts that begin alike.
    """

    max_rows: int = 16
    max_waiting: int = 256
    kept_bytes: int = 1 << 30


class EngineWorker:
    """Runs an engine for many requests; metrics show the rows that run and requests that wait."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, metrics: ServerMetrics, sizes: BatchSizes
    ) -> None:
        self._batch = Batch(engine, PrefixStore(sizes.kept_bytes))
        self._decode, self._sizes = partial(tokenizer.decode, skip_special_tokens=True), sizes
        added = tokenizer.get_added_tokens_decoder()
        self._special = {number: token.content for number, token in added.items() if token.special}
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._changed, self._stopping = Condition(), False
        metrics.running.set_function(lambda: len(self._batch.rows))
        metrics.waiting.set_function(lambda: len(self._waiting))
        self._thread = Thread(target=self._run, name="umim-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Fail what is left and wait for the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    def submit(self, job: Job) -> None:
        """Let a request wait for its turn."""
        if job.options.samples > self._sizes.max_rows:
            raise bad_field("n", f"n must be at most {self._sizes.max_rows}", job.options.samples)
        with self._changed:
            if not self.alive:
                raise _ended()
            if len(self._waiting) >= self._sizes.max_waiting:
                rule = f"at most {self._sizes.max_waiting} requests may wait"
                raise try_later("overloaded", rule, len(self._waiting))
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Let a request's rows leave; one that has ended stays as it is."""
        with self._changed:
            job.cancelled = True
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
            self._fail([job], error)
            return 0
        except (MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            self._batch.forget()
            self._fail([job], _no_memory(f"a prompt of {len(job.prompt.ids)} tokens"))
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
        self._fail(jobs, _no_memory(f"{rows} rows"))
        _log.warning("out of memory, %d requests failed", len(jobs))

    def _fail(self, jobs: Sequence[Job], error: UmimError) -> None:
        for job in jobs:
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


def _no_memory(needed: str) -> ApiError:
    return try_later("out_of_memory", "the memory must have room for what runs", needed)


def _ended() -> ApiError:
    return try_later("unavailable", "the engine must run", "it has stopped")
