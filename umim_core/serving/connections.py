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
from types import FrameType
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from umim_core.serving.guard import error_response
from umim_core.serving.openai_api import try_later

_GRACE_SECONDS: Final = 30
_HEAD_SECONDS: Final = 30.0  # until the head of a request must have come
_WRITE_SECONDS: Final = 30.0  # until a reader must have taken a part of its answer
_MOST: Final = 1024
_ACCEPTED_AT_ONCE: Final = 8
_QUEUE: Final = 512
_OTHER_FILES: Final = 64  # the program's own
_log: Final = logging.getLogger("umim.serve")


def most_connections() -> int:
    """Return how many connections may be open: half of the files that a process may open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if files < 0 else max(8, min(_MOST, (files - _OTHER_FILES) // 2))


class Connection(H11Protocol):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.idle_since = self.loop.time()
        self._stuck_since: float | None = None  # while nothing more may be written

    @property
    def idle(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return cycle is None or cycle.response_complete or self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, for another one if there are too many."""
        super().connection_made(transport)
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

    def on_response_complete(self) -> None:
        self.idle_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck_since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stuck_since = None

    def close_if_overdue(self) -> None:
        now = self.loop.time()
        if self._stuck_since is not None and now - self._stuck_since > _WRITE_SECONDS:
            _log.warning("a reader took nothing of its answer for %g s", _WRITE_SECONDS)
            self.transport.abort()
        elif self.idle and now - self.idle_since > _HEAD_SECONDS:
            self.transport.abort()


class BoundedServer(uvicorn.Server):
    """A server of an application whose connections are bounded; answers have 30 s to end."""

    def __init__(self, app: Starlette, host: str, port: int) -> None:
        config = uvicorn.Config(
            app, host=host, port=port, http=Connection, log_config=None, access_log=False,
            server_header=False, timeout_graceful_shutdown=_GRACE_SECONDS,
            backlog=_ACCEPTED_AT_ONCE,
        )  # fmt: skip
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with a longer queue than asyncio accepts at once, uncounted by connections."""
        await super().startup(sockets)
        for listening in (listener for server in self.servers for listener in server.sockets):
            with socket.socket(fileno=os.dup(listening.fileno())) as same:
                same.listen(_QUEUE)

    async def on_tick(self, counter: int) -> bool:
        """Close connections that are overdue, ten times a second."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.close_if_overdue()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Exit; after a second Ctrl-C no traceback is logged for each answer that is cut."""
        super().handle_exit(sig, frame)
        if self.force_exit:
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
