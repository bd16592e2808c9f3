"""Sixty-four clients at once: no stream is lost, mixed or doubled."""

from __future__ import annotations

import asyncio
import json
from typing import Final

import httpx

from support.servers import CHAT, QUESTIONS, in_thread, metric, piece
from umim_core import UMIM
from umim_core.serving.engine_server import EngineServer, LocalEngine, Served
from umim_core.serving.engine_worker import BatchSizes
from umim_core.serving.guard import Limits

CLIENTS: Final = 64
NEW: Final = 12


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


async def ask_all(url: str) -> list[str]:
    """What all clients are answered at once, each of eight its own question."""
    bounds = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=bounds) as client:
        return await asyncio.gather(*(ask(client, number % 8) for number in range(CLIENTS)))


def test_every_client_gets_its_own_answer(umim: UMIM) -> None:
    sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "merge": "prompt", "raw_tail": 4}
    texts = [
        umim.generate(chat, max_new_tokens=NEW, seed=number, **sampled).text[0]
        for number, chat in enumerate(chats())
    ]
    assert len(set(texts)) == len(texts)
    served = Served("tiny", umim.merged_model, "prompt", 4)
    server = EngineServer(LocalEngine(served, BatchSizes(kept_bytes=0)), Limits())
    with in_thread(server.app(None)) as url:
        assert asyncio.run(ask_all(url)) == texts * (CLIENTS // 8)
        assert metric(url, "umim_generated_tokens_total") <= CLIENTS * NEW
        assert metric(url, "umim_rows_running") == 0
