"""Readers that take nothing, against a real server on loopback."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from support.servers import in_thread, wait_for
from umim_core.serving.connections import Connection
from umim_core.serving.guard import EventStream, Limits, ServerMetrics, deadline, guarded


@asynccontextmanager
async def nothing(app: Starlette) -> AsyncIterator[None]:
    yield


class Hasty(Connection):
    head_seconds = 0.5
    write_seconds = 0.3


def test_a_reader_that_takes_nothing_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    closed = threading.Event()

    async def endless() -> AsyncGenerator[dict[str, str], None]:
        try:
            while True:
                yield {"text": "x" * (1 << 20)}
                await asyncio.sleep(0)
        finally:
            closed.set()

    async def streamed(request: Request) -> Response:
        return EventStream(endless(), deadline(Limits()))

    app = guarded([Route("/endless", streamed)], None, ServerMetrics(), nothing)
    with in_thread(app, connection=Hasty) as url:
        address = urlsplit(url)
        with socket.create_connection((address.hostname or "", address.port or 0)) as reader:
            reader.sendall(b"GET /endless HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert closed.wait(60)
            assert httpx.get(url + "/metrics", timeout=120).status_code == 200  # others are served
            wait_for(url, "umim_requests_in_flight", 1)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("host", "token", "status"),
    [
        ("evil.example:8000", None, 400),
        ("evil.example:8000", "secret", 200),
        ("localhost:8000", None, 200),
        ("127.0.0.1", None, 200),
    ],
)
def test_without_a_token_only_names_of_this_machine_are_answered(
    host: str, token: str | None, status: int
) -> None:
    app = guarded([], token, ServerMetrics(), nothing)
    headers = {"host": host, "authorization": "Bearer secret"}

    async def ask() -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://any") as client:
            return (await client.get("/metrics", headers=headers)).status_code

    assert asyncio.run(ask()) == status
