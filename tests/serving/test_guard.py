"""Clients that are answered, and connections that say nothing or take nothing, at real servers."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from support.servers import HTTP, in_thread, wait_for
from umim_core.serving import connections, guard
from umim_core.serving.connections import BoundedServer
from umim_core.serving.guard import EventStream, Limits, ServerMetrics, deadline, guarded, read_body
from umim_core.serving.openai_api import ApiError

HEAD = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n"


closed = threading.Event()


async def streamed(request: Request) -> Response:
    async def endless() -> AsyncGenerator[dict[str, str], None]:
        try:
            while True:
                yield {"text": "x" * (1 << 20)}
                await asyncio.sleep(0)
        finally:
            closed.set()

    return EventStream(endless(), deadline(600))


async def read(request: Request) -> Response:
    return PlainTextResponse(str(len(await read_body(request, Limits()))))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    routes = [Route("/endless", streamed), Route("/read", read, methods=["POST"])]
    with pytest.MonkeyPatch.context() as hasty:
        hasty.setattr(connections, "_HEAD_SECONDS", 1.0)
        hasty.setattr(connections, "_WRITE_SECONDS", 0.3)
        with in_thread(guarded(routes, None, ServerMetrics())) as address:
            yield address


def connected(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname or "", address.port or 0), timeout=60)


def ended(reader: socket.socket) -> bool:
    """Whether the server closes a connection, whatever it has answered before."""
    try:
        while reader.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def test_a_reader_that_takes_nothing_is_given_up(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(url) as reader:
        reader.sendall(b"GET /endless HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert closed.wait(60)
        assert HTTP.get(url + "/metrics").status_code == 200  # others are served
        wait_for(url, "umim_requests_in_flight", 1)
    assert "Traceback" not in caplog.text


def test_what_never_becomes_a_request_is_closed(url: str) -> None:
    heads = (
        b"",
        b"GET /met",
        HEAD + b"x: y\r\n",
        HEAD + b"\r\n" + HEAD,  # an answered request, and half of another
        b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nx",
    )
    with ExitStack() as stack:
        clients = {sent: stack.enter_context(connected(url)) for sent in heads}
        for sent, client in clients.items():
            client.sendall(sent)
        for _ in range(30):  # a byte now and then does not help
            time.sleep(0.05)
            for client in clients.values():
                with suppress(OSError):  # closed already
                    client.sendall(b"x")
        assert [sent for sent, client in clients.items() if not ended(client)] == []


def test_a_slow_body_has_its_own_time(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_BODY_SECONDS", 3)
    for rest, said in ((b"x", b"200"), (b"", b"408")):
        with connected(url) as client:
            head = b"POST /read HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n"
            client.sendall(head + b"x")
            time.sleep(1.5)  # more than a head has
            client.sendall(rest)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 " + said)


def test_a_body_is_not_read_beyond_its_bound() -> None:
    parts = iter([b"x" * 100] * 11)

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": next(parts), "more_body": True}

    request = Request({"type": "http", "headers": []}, receive)
    with pytest.raises(ApiError, match="a body may have 1000 bytes"):
        asyncio.run(read_body(request, Limits(1000)))


@pytest.mark.parametrize("sent", [b"", b"GET /met", b"POST /read HTTP/1.1\r\nhost: a\r\n"])
def test_idle_connections_make_room_for_requests(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "most_connections", lambda: 8)
    monkeypatch.setattr(connections, "_WRITE_SECONDS", 30.0)  # readers of the module are hasty
    app = guarded([Route("/endless", streamed)], None, ServerMetrics())
    with in_thread(app) as url, ExitStack() as stack:
        idle = [stack.enter_context(connected(url)) for _ in range(50)]
        for client in idle:
            with suppress(OSError):  # closed already
                client.sendall(sent)
        for _ in range(20):
            assert HTTP.get(url + "/metrics").status_code == 200
        assert ended(idle[0])
        # Where all have a request, a new one is told so.
        for client in [stack.enter_context(connected(url)) for _ in range(8)]:
            client.sendall(b"GET /endless HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert client.recv(100)
        answer = HTTP.get(url + "/metrics")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "overloaded"


Fields = list[tuple[str, str | bytes]]
EVIL = ("origin", "https://evil.example")


@pytest.mark.parametrize(
    ("token", "fields", "status"),
    [
        *((None, [("host", h)], 400) for h in ("evil.example:8000", "127.0.0.1.a", "::1", "")),
        *((None, [("host", h)], 200) for h in ("[::1]:8000", "localhost:8000", "127.0.0.1")),
        (None, [("host", "localhost"), EVIL], 403),
        (None, [("host", "localhost"), ("origin", "null")], 403),
        (None, [("host", "localhost"), ("origin", "http://[")], 403),
        (None, [("host", "localhost:8000"), ("origin", "http://localhost:3000")], 403),
        (None, [("host", "localhost:8000"), ("origin", "http://LOCALHOST:8000")], 200),
        (None, [("host", "localhost"), ("origin", "http://localhost"), EVIL], 403),
        (None, [("host", "localhost"), ("sec-fetch-site", "cross-site")], 403),
        (None, [("host", "localhost"), ("sec-fetch-site", "Same-Site")], 403),
        (None, [("host", "localhost"), ("sec-fetch-site", "same-origin")], 200),
        (None, [("host", "localhost"), ("sec-fetch-site", "none")], 200),
        ("secret", [], 401),
        ("secret", [("authorization", "Bearer ")], 401),
        ("secret", [("authorization", "secret")], 401),
        ("secret", [("authorization", "Bearer wrong")], 401),
        ("secret", [("authorization", "Basic secret")], 401),
        ("secret", [("authorization", "Bearer secret"), ("authorization", "Bearer secret")], 401),
        ("secret", [("authorization", "Bearer secret")], 200),
        ("secret", [("authorization", "bEARER  secret")], 200),
        ("secret", [("authorization", "Bearer secret"), EVIL, ("host", "evil.example")], 200),
        ("Schlüssel", [("authorization", "Bearer Schlüssel".encode())], 200),
        ("Schlüssel", [("authorization", "Bearer Schlüssel".encode("latin-1"))], 200),
        ("Schlüssel", [("authorization", b"Bearer Schlssel")], 401),
        ("ключ", [("authorization", "Bearer ключ".encode())], 200),
        ("ключ", [("authorization", b"Bearer")], 401),
    ],
)
def test_who_is_answered(token: str | None, fields: Fields, status: int) -> None:
    app = guarded([], token, ServerMetrics())
    headers = [(name.encode(), v if isinstance(v, bytes) else v.encode()) for name, v in fields]

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://any") as client:
            return await client.get("/metrics", headers=headers)

    answer = asyncio.run(ask())
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"].keys() == {"message", "type", "param", "code"}


def test_a_second_ctrl_c_logs_no_traceback_of_what_it_cuts() -> None:
    server, log = BoundedServer(Starlette(), "127.0.0.1", 0), logging.getLogger("uvicorn.error")
    said, before = [], log.level
    try:
        for _ in range(2):
            server.handle_exit(signal.SIGINT, None)
            said.append(log.isEnabledFor(logging.ERROR))
    finally:
        log.setLevel(before)
    assert said == [True, False]
