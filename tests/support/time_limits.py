"""Time limits of tests: one that hangs is failed by name, and the run goes on.

A test gets the limit ``timeout`` of pyproject.toml, fixtures included; one marked ``full`` gets
``timeout_full``, and ``@pytest.mark.timeout(seconds)`` beats both. pytest-timeout measures them.

Its own ways to end a test do not reach far enough. Ray waits in native code that lets nothing but
KeyboardInterrupt out (an exception of another type is kept until the wait is over), so at the limit
the test is interrupted as Ctrl-C would do it, and the interruption becomes its failure. Native code
that answers no signal would hang all the same: ``timeout_grace`` seconds later the process dumps
the stacks of its threads, the test's name among them, and ends. Under pytest-xdist that is one
worker, which is replaced.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Generator
from typing import Protocol

import pytest
import pytest_timeout


class _Settings(Protocol):
    timeout: float


_STDERR = pytest.StashKey[int]()  # the terminal's, before output is captured
_EXPIRED = pytest.StashKey[float]()  # seconds after which a test was interrupted


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("timeout_full", "Seconds that a test marked `full` may take.", default="0")
    parser.addini("timeout_grace", "Seconds until a test that ignores its limit ends the process.")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2)


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_STDERR])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    limit = float(config.getini("timeout_full"))
    for item in items:
        if limit and item.get_closest_marker("full") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(limit))


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: _Settings) -> bool:
    def interrupt(*_: object) -> None:
        if pytest_timeout.is_debugging():
            return
        item.stash[_EXPIRED] = settings.timeout
        faulthandler.dump_traceback(2)
        raise KeyboardInterrupt(f"after {settings.timeout:g} s")

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    if grace := item.config.getini("timeout_grace"):
        faulthandler.dump_traceback_later(
            settings.timeout + float(grace), exit=True, file=item.config.stash[_STDERR]
        )
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer() -> bool:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.cancel_dump_traceback_later()
    return True


def pytest_enter_pdb() -> None:
    pytest_timeout_cancel_timer()


def _within_limit(item: pytest.Item) -> Generator[None, object, object]:
    """Turn what comes of an interruption, even a good end, into the test's failure."""
    try:
        return (yield)
    finally:
        if _EXPIRED in item.stash:
            limit = item.stash[_EXPIRED]
            del item.stash[_EXPIRED]  # the phases that follow may end well
            pytest.fail(f"Timeout: the test took more than {limit:g} s")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _within_limit(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _within_limit(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _within_limit(item))
