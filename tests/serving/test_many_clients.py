"""Sixty-four clients at once: no stream is lost, mixed or doubled, and memory stays flat."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Final

import httpx
import psutil
import pytest

from support.servers import CHAT, CHATML, QUESTIONS, Served, in_thread, metric, piece
from umim_core import UMIM
from umim_core.serving.engine_app import EngineServer
from umim_core.serving.engine_worker import BatchSizes
from umim_core.serving.guard import Limits
from umim_core.serving.local_engine import LocalEngine
from umim_core.serving.local_engine import Served as ServedModel

CLIENTS: Final = 64
NEW: Final = 12
MEGABYTES: Final = 64  # that may come after the first third of a run: caches of spans, fragments


def chats() -> list[list[dict[str, str]]]:
    """Eight chats, each with a question and words of its own."""
    words = ("axis", "shape", "dtype", "order", "value", "index", "array", "copy")
    return [
        [{"role": "user", "content": f"{QUESTIONS[b % 4]} Tell me about the {word}."}]
        for b, word in enumerate(words)
    ]


def body_of(number: int) -> dict[str, object]:
    """A request whose answer is its own: the seed decides it."""
    chat = chats()[number]
    return {"messages": chat, "max_tokens": NEW, "temperature": 1.0, "seed": number}


async def ask(client: httpx.AsyncClient, number: int) -> str:
    """Text of a streamed answer; exactly one end is wanted."""
    body = {**body_of(number), "stream": True}
    text, ends, done = "", 0, 0
    async with client.stream("POST", CHAT, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                done += 1
            elif line:
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text += piece(choice)
                ends += choice["finish_reason"] is not None
    assert (ends, done) == (1, 1)
    return text


async def load(url: str, texts: list[str], seconds: float) -> Counter[int]:
    """Let all clients ask again and again, each its own question; count the right answers."""
    end, right = time.monotonic() + seconds, Counter[int]()
    bounds = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=bounds) as client:

        async def one(number: int) -> None:
            chat = number % len(texts)
            while True:
                assert await ask(client, chat) == texts[chat]
                right[number] += 1
                if time.monotonic() >= end:
                    return

        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(one(number))
    return right


@pytest.fixture(scope="module")
def texts(umim: UMIM) -> list[str]:
    """What each chat is answered, alone."""
    sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "merge": "prompt", "raw_tail": 4}
    own = [
        umim.generate(chat, max_new_tokens=NEW, seed=number, **sampled)
        for number, chat in enumerate(chats())
    ]
    return [output.text[0] for output in own]


def test_every_client_gets_its_own_answer(umim: UMIM, texts: list[str]) -> None:
    assert len(set(texts)) == len(texts)
    served = ServedModel("tiny", umim.merged_model, "prompt", 4)
    server = EngineServer(LocalEngine(served, BatchSizes(kept_bytes=0)), Limits())
    with in_thread(server.app(None)) as url:
        right = asyncio.run(load(url, texts, 0.0))
        assert sum(right.values()) == len(right) == CLIENTS
        assert metric(url, "umim_generated_tokens_total") <= CLIENTS * NEW
        assert metric(url, "umim_rows_running") == 0


@pytest.mark.full
@pytest.mark.parametrize("through", ["engine", "gateway"])
def test_a_minute_of_clients_leaves_memory_flat(
    umim: UMIM, export: Path, tmp_path: Path, through: str
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(CHATML)
    options = ("--dtype", "float64", "--prefix-cache-mb", 16, "--chat-template", template)
    if through == "engine":
        servers = [Served("umim-docs-llama", "--merge", "prompt", *options)]
    else:
        servers = [Served(export, "--base", *options)]
        servers.append(Served("--upstream", servers[0].url, "--export", export, "--upstream-masks"))
    url = servers[-1].url
    processes = [psutil.Process(server.process.pid) for server in servers]

    def held() -> float:
        return sum(process.memory_info().rss for process in processes) / (1 << 20)

    try:
        with httpx.Client(base_url=url, timeout=600) as client:
            answers = [client.post(CHAT, json=body_of(number)) for number in range(8)]
        own = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
        assert len(set(own)) == 8
        warm = asyncio.run(load(url, own, 20.0))
        before = held()
        right = asyncio.run(load(url, own, 60.0))
        after = held()
        print(f"{through}: {sum(right.values())} streams, {before:.0f} -> {after:.0f} MB")
        assert len(warm) == len(right) == CLIENTS
        assert after - before < MEGABYTES
    finally:
        for server in reversed(servers):
            server.process.terminate()
            assert server.end() == -signal.SIGTERM
    assert not any("Traceback" in line for server in servers for line in server.lines)
