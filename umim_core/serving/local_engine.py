"""A model that answers in this process: its engine, worker thread and tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.concurrency import run_in_threadpool
from transformers import PreTrainedTokenizerFast

from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.checkpoint.checkpoint_files import default_checkpoint
from umim_core.config.form import Merge
from umim_core.errors import ConfigError, UmimError
from umim_core.inference.engine import Engine
from umim_core.inference.options import GenerateOptions
from umim_core.inference.prompts import PromptIds, TokenPrompt
from umim_core.merging.merged_model import MergedModel
from umim_core.model.umim import UMIM
from umim_core.serving.engine_worker import BatchSizes, EngineWorker, Event, Failed, Job, Piece
from umim_core.serving.guard import ServerMetrics
from umim_core.serving.openai_api import AnyBody, ChatBody
from umim_core.serving.prompt_reader import PromptReader, check_tokens, most_raw_tokens


@dataclass(frozen=True)
class Served:
    """A model as it is served.

    Attributes:
        name: How requests call it.
        merged_model: The model; without rules it reads raw tokens.
        raw_tail: Last tokens of a prompt, and of each message of a chat, that stay raw.
    """

    name: str
    merged_model: MergedModel
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
        return cls(name or source, umim.merged_model, *umim.checkpoint.config.recommended(merge))

    @property
    def backbone(self) -> Backbone:
        return self.merged_model.backbone


class LocalEngine:
    """Answers requests from one batch; see ``AnswerEngine``."""

    def __init__(self, served: Served, sizes: BatchSizes) -> None:
        tokenizer = served.backbone.require_tokenizer()
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ConfigError(
                "a served model needs a fast tokenizer",
                type(tokenizer).__name__,
                "Convert it to a tokenizer.json.",
            )
        self._served = served
        self.name, self.positions = served.name, served.backbone.max_positions
        self.metrics = ServerMetrics()
        self.worker = EngineWorker(
            Engine(served.merged_model), tokenizer.backend_tokenizer, self.metrics, sizes
        )
        self._reader = PromptReader(tokenizer)

    @asynccontextmanager
    async def life(self) -> AsyncIterator[None]:
        """Let the worker run for the length of a block."""
        self.worker.start()
        try:
            yield
        finally:
            await run_in_threadpool(self.worker.stop)

    async def alive(self) -> bool:
        return self.worker.alive

    async def events(
        self, body: AnyBody, merging: bool, new_tokens: int
    ) -> AsyncGenerator[Event, None]:
        """Give what happens to a request; closing it frees the rows.

        The answer has at most ``new_tokens`` where the request says no number.
        """
        loop, events = asyncio.get_running_loop(), asyncio.Queue[list[Event]]()

        def deliver(new: list[Event]) -> None:
            loop.call_soon_threadsafe(events.put_nowait, new)

        try:
            prompt = await self._prompt(body, merging)
            options = self._options(body, merging, new_tokens)
            job = Job(prompt, options, body.new_tokens is None, body.stops, deliver)
            self.worker.submit(job)
        except UmimError as error:
            yield Failed(error)
            return
        try:
            left = job.samples
            while left:
                for one in await events.get():
                    yield one
                    if isinstance(one, Failed):
                        return
                    left -= isinstance(one, Piece) and one.finish is not None
        finally:
            self.worker.cancel(job)

    def _options(self, body: AnyBody, merging: bool, new_tokens: int) -> GenerateOptions:
        """Sample as OpenAI's, whatever the model's own generation_config says."""
        sampling: dict[str, Any] = {"do_sample": False}
        if body.temperature != 0:
            temperature = 1.0 if body.temperature is None else body.temperature
            top_p = 1.0 if body.top_p is None else body.top_p
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": top_p}
            sampling["seed"] = body.seed  # clients give one to greedy requests, too
        merge = self._served.merge if merging else "none"
        return GenerateOptions(
            max_new_tokens=body.new_tokens or new_tokens,
            n=body.n,
            merge=merge,
            raw_tail=0 if merge == "none" else self._served.raw_tail,
            **sampling,
        ).of_model(self._served.backbone)

    async def _prompt(self, body: AnyBody, merging: bool) -> TokenPrompt:
        merged = merging and self._served.merge != "none"
        by_units = merged and self._served.merged_model.unit_positions == "compact"
        most = most_raw_tokens(self.positions, by_units)
        if isinstance(body, ChatBody):
            read = await self._reader.chat([message.plain() for message in body.messages], most)
            if merged and read.left_raw:
                self.metrics.stays_raw("template", read.left_raw)
            return PromptIds(read.ids, read.ranges or ())
        if isinstance(body.prompt, str):
            return (await self._reader.text(body.prompt, most)).ids
        check_tokens(len(body.prompt), most)
        return np.array(body.prompt)
