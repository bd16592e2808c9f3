"""Templates of chats, run by transformers in the sandbox that it has for them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateError

from umim_core.errors import GenerationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chat = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
# What templates raise, which are programs.
_FAULTS: Final = (
    *(ArithmeticError, AttributeError, LookupError, MemoryError, NameError, RuntimeError),
    *(TypeError, ValueError, TemplateError),
)


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
            "Pass a text, or set tokenizer.chat_template.",
        )
    return template


def rendered(
    template: str, chat: Chat, tokenizer: PreTrainedTokenizerBase, tools: Tools | None
) -> str:
    """Write a conversation by a template, the beginning of a reply behind it."""
    from transformers.utils.chat_template_utils import render_jinja_template  # slow to import

    names: Any = tokenizer.special_tokens_map
    messages = [{key: x for key, x in message.items() if x is not None} for message in chat]
    with _typed_faults():
        written: Any = render_jinja_template(  # whose annotation is wrong
            [messages],
            tools=tools,  # type: ignore[arg-type]  # any mapping
            chat_template=template,
            add_generation_prompt=True,
            **names,
        )
        return str(written[0][0])


@contextmanager
def _typed_faults() -> Iterator[None]:
    try:
        yield
    except _FAULTS as error:
        raise GenerationError(
            "a chat needs a template that writes it, and messages of role and content",
            f"{type(error).__name__}: {str(error)[:200]}",
            "Pass a text, or messages as the template expects them.",
        ) from error


def as_json(value: object) -> str:
    """Return a chat as JSON; what JSON has no form for shows its type alone."""
    with _typed_faults():
        return json.dumps(value, default=lambda other: f"<{type(other).__name__}>")
