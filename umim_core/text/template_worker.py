"""The process that runs templates for ``template_process``, apart from this package.

A template is code of whoever made the model: it may loop for ever, or double a text until memory is
gone. Here the kernel ends it, by a timer of processor time, which others do not use up, and a bound
on memory. One JSON request per line, ``{"template", "messages", "tools", "names"}``, one JSON
answer, ``{"text"}`` or ``{"error"}``.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any, Final

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

_SECONDS: Final = 4  # of processor time
_WALL_SECONDS: Final = 60  # for what waits
_BYTES: Final = 1 << 30  # of addresses; Python and its libraries have about a third of them
_CHARACTERS: Final = 1 << 20  # that a template may add to what the chat itself says
_FAULTS: Final = (
    ArithmeticError, AttributeError, LookupError, MemoryError, NameError, RuntimeError, TypeError,
    ValueError, TemplateError,
)  # fmt: skip


def _answer(line: bytes) -> dict[str, Any]:
    longer = len(line) // 1_000_000
    signal.setitimer(signal.ITIMER_PROF, _SECONDS + longer)
    signal.setitimer(signal.ITIMER_REAL, _WALL_SECONDS + longer)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    bound = _BYTES + 64 * len(line)
    if hard != resource.RLIM_INFINITY:
        bound = min(bound, hard)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
    try:
        request = json.loads(line)
        rendered: Any = render_jinja_template(  # whose annotation is wrong
            [request["messages"]],
            tools=request["tools"],
            chat_template=request["template"],
            add_generation_prompt=True,
            **request["names"],
        )
        text: str = rendered[0][0]
    except _FAULTS as error:
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    if len(text) > _CHARACTERS + 16 * len(line):
        return {"error": f"{len(text):,} characters"}
    return {"text": text}


def main() -> None:
    """Answer requests until stdin ends."""
    for line in sys.stdin.buffer:
        answer = json.dumps(_answer(line))
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
