"""Servers of tests: real ones on loopback, in a thread or in a process of their own."""

from __future__ import annotations

import json
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any, Final

import httpx
from starlette.applications import Starlette

from support.processes import ROOT
from umim_core.serving.connections import BoundedServer

CHATML: Final = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call as <tool_call>{"name": NAME, "arguments": {}}</tool_call><|endoftext|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}{{ " " + m.name if m.name }}
{{ m.content }}{% for call in m.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|endoftext|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # as Qwen's
QUESTIONS: Final = (
    "Return the sum of the array elements over a given axis, and the number of elements.",
    "What is the shape of the array that is returned by this function?",
    "Does the function return a new array or a view of the input array?",
    "What happens if the axis is not None and the array has no elements at all?",
)
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
_SECONDS: Final = 240.0
# One client: to make one reads the machine's certificates, for 25 ms. It keeps no connection.
HTTP: Final = httpx.Client(timeout=_SECONDS, limits=httpx.Limits(max_keepalive_connections=0))


def free_port() -> int:
    """Return a port of loopback on which nothing listens.

    It is none of those that Linux by default gives to connections, to Ray or to who asks for any:
    such a one may be gone before its server has started.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextmanager
def in_thread(app: Starlette, port: int = 0) -> Iterator[str]:
    """Serve an application on a free port of loopback; give its address."""
    server = BoundedServer(app, "127.0.0.1", port)
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + _SECONDS
    while not server.started:
        assert thread.is_alive() and time.monotonic() < end
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(_SECONDS)
        assert not thread.is_alive()


class Served:
    """``umim serve`` in a process of its own; ``lines`` are what it has said on stderr."""

    def __init__(self, *arguments: object, port: int = 0) -> None:
        command = "from umim_core.cli.app import main; main()"
        options = [str(argument) for argument in (*arguments, "--port", port)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", command, "serve", *options],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self.lines: list[str] = []
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"running on (http://[\d.:]+)", line):
                break
        else:
            raise AssertionError("".join(self.lines))
        self.url = found.group(1)
        self._reader = Thread(target=self.lines.extend, args=(self.process.stderr,), daemon=True)
        self._reader.start()

    def end(self) -> int:
        """Wait for the process and its last words; return its status."""
        status = self.process.wait(_SECONDS)
        self._reader.join(_SECONDS)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status


def post(url: str, path: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return HTTP.post(url + path, json=body, headers=headers)


def answered(url: str, path: str, body: dict[str, Any], streamed: bool = True) -> dict[str, Any]:
    """A whole answer, or what its stream adds up to; that the end was said is checked."""
    if not streamed:
        document: dict[str, Any] = post(url, path, **body).json()
        return document
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with HTTP.stream("POST", url + path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        *lines, done = filter(None, answer.iter_lines())
    assert done == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    *parts, last = (json.loads(line.removeprefix("data: ")) for line in lines)
    assert last["usage"] and not last["choices"] and not any(part["usage"] for part in parts)
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for part in parts for choice in part["choices"]):
        first, delta = choice["index"] not in choices, choice.get("delta", {})
        assert ("role" in delta) == (first and path == CHAT)
        whole = choices.setdefault(choice["index"], {"text": "", "message": {"tool_calls": []}})
        whole |= {"index": choice["index"], "finish_reason": choice["finish_reason"]}
        whole["text"] += delta.get("content", choice.get("text", ""))
        whole["message"] |= {"role": delta["role"]} if first and path == CHAT else {}
        for call in delta.get("tool_calls", []):
            assert call.pop("index") == len(whole["message"]["tool_calls"])
            whole["message"]["tool_calls"].append(call)
    for whole in choices.values():
        message = whole["message"]
        message["content"] = whole["text"] or (None if message["tool_calls"] else "")
        if not message["tool_calls"]:
            del message["tool_calls"]
    kind = parts[0]["object"].removesuffix(".chunk")
    return {**last, "object": kind, "choices": list(choices.values())}


def metric(url: str, name: str) -> float:
    for line in HTTP.get(url + "/metrics").text.splitlines():
        if line.startswith(name + " "):
            return float(line.split()[-1])
    raise AssertionError(name)


def wait_for(url: str, name: str, value: float) -> None:
    end = time.monotonic() + _SECONDS
    while metric(url, name) != value:
        assert time.monotonic() < end, f"{name} is {metric(url, name)}"
        time.sleep(0.02)
