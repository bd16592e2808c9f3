"""Clients that are answered and clients that are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.applications import Starlette

from umim_core.serving.guard import ServerMetrics, guarded


@asynccontextmanager
async def nothing(app: Starlette) -> AsyncIterator[None]:
    yield


Fields = list[tuple[str, str | bytes]]
EVIL = ("origin", "https://evil.example")


@pytest.mark.parametrize(
    ("token", "fields", "status"),
    [
        *(
            (None, [("host", host)], 400)
            for host in ("evil.example:8000", "127.0.0.1.a", "::1", "")
        ),
        (None, [("host", "[::1]:8000")], 200),
        (None, [("host", "localhost:8000")], 200),
        (None, [("host", "127.0.0.1")], 200),
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
    app = guarded([], token, ServerMetrics(), nothing)
    headers = [(name.encode(), v if isinstance(v, bytes) else v.encode()) for name, v in fields]

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://any") as client:
            return await client.get("/metrics", headers=headers)

    answer = asyncio.run(ask())
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"].keys() == {"message", "type", "param", "code"}
