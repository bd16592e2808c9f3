"""Connections of a server on uvicorn: bounded in number and in how long they say nothing.

    silent, or a head that does not end    30 s, then closed
    a reader that takes nothing            30 s, then closed
    more connections than files allow      the one without a whole request for longest goes; where
                                           all have one, the new one gets 503

A client that closes its sending side counts as gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import time
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from umim_core.serving.guard import error_response
from umim_core.serving.openai_api import try_later

_GRACE_SECONDS: Final = 30
_MOST: Final = 1024
_ACCEPTED_AT_ONCE: Final = 8
_QUEUE: Final = 512
_OTHER_FILES: Final = 64  # the program's own
_BETWEEN_REPORTS: Final = 60.0  # seconds
_log: Final = logging.getLogger("umim.serve")


def most_connections() -> int:
    """Return how many connections may be open: half of the files that a process may open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if files < 0 else max(8, min(_MOST, (files - _OTHER_FILES) // 2))


class Connection(H11Protocol):
    head_seconds = 30.0  # until the head of a request must have come
    write_seconds = 30.0  # until a reader must have taken a part of its answer

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._waiting: asyncio.TimerHandle | None = None  # for a head
        self._stuck: asyncio.TimerHandle | None = None
        self.idle_since = self.loop.time()

    @property
    def idle(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return cycle is None or cycle.response_complete or self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, for another one if there are too many."""
        super().connection_made(transport)
        self._waiting = self.loop.call_later(self.head_seconds, self._no_head)
        most = most_connections()
        if len(self.connections) <= most:
            return
        others = [
            other
            for other in self.connections
            if isinstance(other, Connection) and other is not self
            if other.idle or other.cycle.more_body
        ]
        if oldest := min(others, key=lambda other: other.idle_since, default=None):
            self.connections.discard(oldest)  # or the next one would choose it, too
            oldest.transport.abort()
        else:
            refused = try_later("overloaded", f"at most {most} connections may be open", "more")
            self.app = error_response(refused)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.idle and self._waiting is None:
            self._waiting = self.loop.call_later(self.head_seconds, self._no_head)
        elif not self.idle:
            self._end(self._waiting)
            self._waiting = None

    def on_response_complete(self) -> None:
        self.idle_since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(self._waiting, self._stuck)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self.loop.call_later(self.write_seconds, self._unread)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end(self._stuck)

    def _end(self, *timers: asyncio.TimerHandle | None) -> None:
        for timer in timers:
            if timer is not None:
                timer.cancel()

    def _no_head(self) -> None:
        self._waiting = None
        if self.idle:
            self.transport.abort()

    def _unread(self) -> None:
        _log.warning("a reader took nothing of its answer for %g s", self.write_seconds)
        self.transport.abort()


class _Seldom(logging.Filter):
    """Lets asyncio say once a minute that it cannot accept, not a thousand times a second."""

    said = -_BETWEEN_REPORTS

    def filter(self, record: logging.LogRecord) -> bool:
        if "socket.accept()" not in record.getMessage():
            return True
        if time.monotonic() - self.said < _BETWEEN_REPORTS:
            return False
        self.said = time.monotonic()
        return True


_seldom: Final = _Seldom()


class BoundedServer(uvicorn.Server):
    """A server of an application whose connections are bounded; answers have 30 s to end."""

    def __init__(
        self, app: Starlette, host: str, port: int, connection: type[Connection] = Connection
    ) -> None:
        config = uvicorn.Config(
            app, host=host, port=port, http=connection, log_config=None, access_log=False,
            server_header=False, timeout_graceful_shutdown=_GRACE_SECONDS,
            backlog=_ACCEPTED_AT_ONCE,
        )  # fmt: skip
        super().__init__(config)
        logging.getLogger("asyncio").addFilter(_seldom)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve; after a second Ctrl-C no traceback is logged for each answer that was cut."""

        def wanted(_: logging.LogRecord) -> bool:
            return not self.force_exit

        log = logging.getLogger("uvicorn.error")
        log.addFilter(wanted)
        try:
            super().run(sockets)
        finally:
            log.removeFilter(wanted)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with a longer queue than asyncio accepts at once, uncounted by connections."""
        await super().startup(sockets)
        for listening in (listener for server in self.servers for listener in server.sockets):
            with socket.socket(fileno=os.dup(listening.fileno())) as same:
                same.listen(_QUEUE)
