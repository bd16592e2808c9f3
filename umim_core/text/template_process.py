"""Templates of chats, run by a process of their own (``template_worker``).

The process is started when it is first needed and serves until it ends, or until this one does.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from umim_core.errors import GenerationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chat = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
# What ends a process that has no memory: by the kernel, and by libraries that cannot go on.
_MEMORY_SIGNALS: Final = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
_ALIVE: Final = "the process that writes chats must start and live"
_TRY_ALONE: Final = "See what `python -m umim_core.text.template_worker </dev/null` says."


def render_chat(chat: Chat, tokenizer: PreTrainedTokenizerBase, tools: Tools | None = None) -> str:
    """Write a conversation by the template that the tokenizer has for it."""
    return rendered(template_of(tokenizer, tools), chat, tokenizer, tools)


def template_for(tokenizer: PreTrainedTokenizerBase, *, with_tools: bool = False) -> str | None:
    """Return the template that transformers writes a chat by; None for a tokenizer without.

    Of several, ``tool_use`` is for chats with tools, where there is one, ``default`` for others.
    """
    template: str | dict[str, str] | None = tokenizer.chat_template
    if not isinstance(template, dict):
        return template
    names = ("tool_use", "default") if with_tools else ("default",)
    return next((template[name] for name in names if name in template), None)


def template_of(tokenizer: PreTrainedTokenizerBase, tools: Tools | None) -> str:
    """Return the template of a chat; that there is none is an error."""
    template, named = template_for(tokenizer, with_tools=tools is not None), tokenizer.chat_template
    if template is None:
        raise GenerationError(
            "a chat needs a tokenizer with a chat template, the only one or one named default",
            f"templates named {', '.join(sorted(named))}" if named else "one without",
            "Give a text, or a tokenizer with a template: umim serve --chat-template FILE, say.",
        )
    return template


def rendered(
    template: str, chat: Chat, tokenizer: PreTrainedTokenizerBase, tools: Tools | None
) -> str:
    """Write a conversation by a template, the beginning of a reply behind it."""
    line = as_json(
        {
            "template": template,
            "messages": [
                {key: value for key, value in message.items() if value is not None}
                for message in chat
            ],
            "tools": tools,
            "names": tokenizer.special_tokens_map,
        }
    )
    answer = _writers.setdefault(os.getpid(), _Writer()).ask(line)
    if "error" in answer:
        raise _unwritable(answer["error"])
    return str(answer["text"])


def as_json(value: object) -> str:
    """Return a chat as JSON; what JSON has no form for shows its type alone."""
    try:
        return json.dumps(value, default=lambda other: f"<{type(other).__name__}>")
    except (ValueError, TypeError, RecursionError) as error:
        raise _unwritable(f"{type(error).__name__}: {str(error)[:200]}") from error


def _unwritable(value: str, error: type[GenerationError] = GenerationError) -> GenerationError:
    return error(
        "a chat needs a template that writes it in seconds and in bounded memory, and messages of "
        "role and content",
        value,
        "Pass a text, or messages as the template expects them.",
    )


class WriterEndedError(GenerationError):
    """The process ended before it answered: no other form of a chat will do better."""

    @classmethod
    def of(cls, status: int) -> GenerationError:
        """Return the error of an exit status, which is below zero for a signal."""
        if -status in (signal.SIGPROF, signal.SIGALRM):
            return _unwritable("a template that does not end in seconds", cls)
        if -status in _MEMORY_SIGNALS:
            return _unwritable("a template that needs more memory", cls)
        return cls(_ALIVE, f"exit status {status}", _TRY_ALONE)


class _Writer:
    """The process that renders templates (``template_worker``), started when it is first needed."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, line: str) -> dict[str, Any]:
        """Return what it answers; its end is an error."""
        with self._lock:
            if self._process is None:
                self._process = self._started()
            process, answer, status = self._process, b"", 0
            assert process.stdin and process.stdout  # noqa: S101  pipes
            try:
                process.stdin.write(line.encode() + b"\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                pass
            finally:
                if not answer.endswith(b"\n"):  # also where a signal broke the reading off
                    status = self.close()
        if not answer.endswith(b"\n"):
            raise WriterEndedError.of(status)
        answered: dict[str, Any] = json.loads(answer)
        return answered

    def _started(self) -> subprocess.Popen[bytes]:
        atexit.register(self.close)
        script = Path(__file__).with_name("template_worker.py")
        # A session of its own: Ctrl-C is for us, and the end of stdin ends it.
        try:
            return subprocess.Popen(  # noqa: S603  our own file
                [sys.executable, "-P", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        except OSError as error:
            raise WriterEndedError(_ALIVE, str(error), _TRY_ALONE) from error

    def close(self) -> int:
        """End the process, if there is one; return its exit status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()  # without effect on the status of one that ended
        process.communicate()
        return process.returncode


_writers: Final[dict[int, _Writer]] = {}  # by process: one that was forked has no pipes of its own
