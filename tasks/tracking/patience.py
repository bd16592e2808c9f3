"""Time budget of a run for a tracking store that does not answer, and limits of one request."""

from __future__ import annotations

import os
import time
from typing import Final

TOTAL_SECONDS: Final = 10.0
CALL_SECONDS: Final = 5
CREATION_SECONDS: Final = 300  # of a new store: seconds of work, minutes on a busy machine
UPLOAD_SECONDS: Final = 300  # of one file; a server may hand it on before it answers
PROBE_SECONDS: Final = 2
_REPLAY_SECONDS: Final = 60.0
_REPLAY_RETRIES: Final = 3
_FIRST_REST_SECONDS: Final = 5.0
_LONGEST_REST_SECONDS: Final = 60.0
_HURRY_SECONDS: Final = 2.0


class Patience:
    """The time that may still be lost, and when to try again.

    A failed try costs what it took. After one, the store rests, each time twice as long, and the
    next try begins with a short question. A store that refuses connections fails at once, so it is
    tried to the end of the run; one that accepts them and never answers is tried three or four
    times.
    """

    def __init__(
        self,
        total_seconds: float = TOTAL_SECONDS,
        call_seconds: int = CALL_SECONDS,
        retries: int = 0,
    ) -> None:
        self.left = total_seconds
        self.retries = retries
        self._call_seconds = call_seconds
        self._rest = 0.0
        self._rests_until = 0.0

    @classmethod
    def of_a_replay(cls) -> Patience:
        """Return the patience of a command that has nothing else to do."""
        return cls(2 * _REPLAY_SECONDS, int(_REPLAY_SECONDS), _REPLAY_RETRIES)

    @property
    def failing(self) -> bool:
        """Whether the last try failed."""
        return self._rest > 0

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left, so that this process tries no more."""
        return self.left < 1.0

    def resting(self) -> bool:
        """Return whether it is too early for another try."""
        return time.monotonic() < self._rests_until

    def limits(self) -> tuple[int, int, int]:
        """Return seconds: for another process that makes the store, a first call, every other."""
        call = max(1, int(min(self._call_seconds, self.left)))
        first = min(call, PROBE_SECONDS if self.failing else CALL_SECONDS)
        return (CREATION_SECONDS if first == CALL_SECONDS else first), first, call

    def failed(self, seconds: float) -> None:
        """Count a failed try of that many seconds."""
        self.left -= seconds
        self._rest = min(max(_FIRST_REST_SECONDS, 2 * self._rest), _LONGEST_REST_SECONDS)
        self._rests_until = time.monotonic() + self._rest

    def hurry(self) -> None:
        """Wait two seconds more at most: the process is being stopped."""
        self.left = min(self.left, _HURRY_SECONDS)

    def succeeded(self) -> None:
        """Forget earlier failures; the time they cost stays spent."""
        self._rest = self._rests_until = 0.0


def limit_requests(seconds: int, retries: int = 0) -> None:
    """Let a request of this process fail after some seconds without an answer.

    MLflow reads these at every request; its own defaults wait for minutes.
    """
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(seconds)
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = str(retries)
