"""One session of attacks on a server in a process of its own: it lives, answers, and frees rows."""

from __future__ import annotations

import json
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import psutil
import pytest

from support.servers import CHAT, CHATML, COMPLETIONS, HTTP, Served, metric, wait_for

CHATS: Final = 400
IDLE: Final = 300
FILES: Final = 256
STREAMS: Final = 64
HEALTH_SECONDS: Final = 2.0
LOG_BYTES: Final = 600_000
MEGABYTES: Final = 64  # that may still come: caches of spans, fragments
PIECES: Final = (
    "", " ", "the shape of the array", "\ue0000\ue001", "7310.0.(", "<|im_start|>system\n",
    "<|endoftext|>", "{{ 7 * 7 }}", "{% for x in y %}", "\u2028\u0085\x0b", "\u202e", "🙂日本語",
    "\u0301" * 40, "\x00", "a" * 3000, "0" * 500, '"]}', "data: [DONE]\n\n", "</think>",
)  # fmt: skip
ROLES: Final = ("user", "assistant", "system", "developer", "tool", "", "\ue0000\ue001", "user\n")
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that may open few files."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(CHATML)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, before[1]))
    try:
        sizes = ("--max-rows", 16, "--max-waiting", 256, "--prefix-cache-mb", 16)
        served = Served("umim-docs-llama", "--chat-template", template, *sizes)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    yield served
    served.process.send_signal(signal.SIGTERM)
    assert served.end() == -signal.SIGTERM
    log = "".join(served.lines)
    print(f"log: {len(log)} bytes")
    assert len(log) < LOG_BYTES and "Traceback" not in log.replace("socket.accept()", "")


@contextmanager
def watched(server: Served, name: str) -> Iterator[None]:
    """Ask for a sign of life all the time; afterwards all rows must be free."""
    done, seconds, statuses = threading.Event(), list[float](), list[int]()

    def ask() -> None:
        while not statuses or not done.wait(0.1):  # once at least, however short the attack is
            began = time.monotonic()
            statuses.append(HTTP.get(server.url + "/health").status_code)
            seconds.append(time.monotonic() - began)

    asking = threading.Thread(target=ask)
    asking.start()
    began = time.monotonic()
    try:
        yield
    finally:
        took = time.monotonic() - began
        done.set()
        asking.join(120)
    wait_for(server.url, "umim_rows_running", 0)
    wait_for(server.url, "umim_requests_waiting", 0)
    used = psutil.Process(server.process.pid).memory_info().rss >> 20
    print(
        f"{name}: {took:.1f} s, /health {max(seconds):.2f} s at most of {len(seconds)}, {used} MB"
    )
    assert set(statuses) == {200} and len(statuses) == len(seconds)
    assert max(seconds) < HEALTH_SECONDS


def chat(rng: random.Random) -> dict[str, Any]:
    messages = [
        {
            "role": rng.choice(ROLES) if rng.random() < 0.5 else "user",
            "content": "".join(rng.choices(PIECES, k=rng.randrange(4))),
        }
        for _ in range(rng.randrange(1, 7))
    ]
    body = {"messages": messages, "max_tokens": rng.randrange(1, 4), "temperature": 0}
    if rng.random() < 0.3:
        name, text = rng.choice(PIECES) or "f", rng.choice(PIECES)
        function = {"name": name[:256], "parameters": {text: text}}
        body["tools"] = [{"type": "function", "function": function}]
        body["tool_choice"] = rng.choice(("auto", "none", "required"))
    return body


def test_fuzzed_chats_are_answered(server: Served) -> None:
    rng = random.Random(52)
    bodies = [chat(rng) for _ in range(CHATS)]
    with watched(server, f"{CHATS} chats"), ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda body: HTTP.post(server.url + CHAT, json=body), bodies)
        codes = [answer.status_code for answer in answers]
    counts = {code: codes.count(code) for code in sorted(set(codes))}
    print(counts)
    assert set(counts) <= {200, 400} and counts[200] > CHATS // 2


def test_idle_connections_keep_nobody_out(server: Served) -> None:
    address = urlsplit(server.url)
    place = (address.hostname or "", address.port or 0)
    heads = (b"", b"GET /hea", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n")
    idle: list[socket.socket] = []
    with watched(server, f"{IDLE} idle connections"):
        for number in range(IDLE):
            idle.append(socket.create_connection(place, timeout=30))
            idle[-1].sendall(heads[number % 3])
        time.sleep(10)
        asked = {"prompt": "The shape", "max_tokens": 1}
        assert HTTP.post(server.url + COMPLETIONS, json=asked).status_code == 200
    for client in idle:
        client.close()


def read(url: str, number: int) -> bool:
    """Ask for a stream, which every second client leaves; return whether its end was read."""
    body = {"prompt": f"The shape {number}", "stream": True, "temperature": 0}
    body["max_tokens"] = 256 if number % 4 == 0 else 4
    with HTTP.stream("POST", url + COMPLETIONS, json=body) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        return "data: [DONE]" in (next(lines) if number % 2 else list(lines))


def test_streams_whose_clients_leave_free_their_rows(server: Served) -> None:
    process, held = psutil.Process(server.process.pid), list[int]()
    for turn in range(4):
        numbers = range(turn * STREAMS, (turn + 1) * STREAMS)
        with watched(server, f"{STREAMS} streams"), ThreadPoolExecutor(STREAMS) as pool:
            assert sum(pool.map(partial(read, server.url), numbers)) == STREAMS // 2
        held.append(process.memory_info().rss >> 20)
    assert held[3] - held[1] < MEGABYTES
    assert metric(server.url, "umim_requests_in_flight") == 1  # the one that asks


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b'{"messages":[' + b",".join([b'{"role":"user","content":""}'] * 32_000) + b"]}"),
        (CHAT, b'{"messages":[' + b",".join([b'{"role":"user","content":""}'] * 4_000) + b"]}"),
        (CHAT, json.dumps({"messages": [{"role": "user", "content": "a " * 2_000_000}]}).encode()),
        (COMPLETIONS, json.dumps({"prompt": "word " * 800_000}).encode()),
        (COMPLETIONS, b'{"prompt":[' + b",".join([b"5"] * 1_900_000) + b"]}"),
        (COMPLETIONS, b'{"prompt":[' + b",".join([b"true"] * 800_000) + b"]}"),
        (CHAT, b'{"messages":[' + b",".join([b"{}"] * 1_300_000) + b"]}"),
    ],
    ids=["empty messages", "as many as may be", "long chat", "long text", "ids", "flags", "none"],
)
def test_long_prompts_are_refused_while_others_are_answered(
    server: Served, path: str, body: bytes
) -> None:
    with watched(server, f"{len(body)} bytes"), ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(HTTP.post, server.url + path, content=body) for _ in range(4)]
        slowest = 0.0
        while not all(one.done() for one in asking):
            began = time.monotonic()
            small = {"prompt": "a", "max_tokens": 1}
            assert HTTP.post(server.url + COMPLETIONS, json=small).status_code == 200
            slowest = max(slowest, time.monotonic() - began)
        print(f"others: {slowest:.2f} s at most")
        assert slowest < HEALTH_SECONDS
    assert {one.result().status_code for one in asking} == {400}
