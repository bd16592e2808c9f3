"""Calls of tools: what a model writes as OpenAI's clients read it, at both servers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from support.served_models import engine_server
from support.servers import CHAT, CHATML, QUESTIONS, answered, in_thread, post
from umim_core import UMIM
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.rules.matcher import PromptIds
from umim_core.serving.openai_api import ChatPrompt
from umim_core.serving.prompt_reader import PromptReader
from umim_core.serving.tool_calls import Calls, Reply, call_marks

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Return the sum of the array elements.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
TOOLS = [ADD, {"type": "function", "function": {"name": "stop"}}]
USER = {"role": "user", "content": QUESTIONS[0]}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


# What a model writes, the content, and the calls that clients see.
REPLIES: list[tuple[str, str | None, list[tuple[str, dict[str, Any]]]]] = [
    ("Fine.\n", "Fine.\n", []),
    (call("add", x=1), None, [("add", {"x": 1})]),
    ("I see.\n\n" + call("add", x=[1, {"y": "é"}]), "I see.", [("add", {"x": [1, {"y": "é"}]})]),
    (call("add", x=1) + "\n" + call("stop") + "\n", None, [("add", {"x": 1}), ("stop", {})]),
    (call("add", x=1).removesuffix("\n</tool_call>"), None, [("add", {"x": 1})]),
    ('<tool_call>{"name": "stop"}</tool_call> Then more.', " Then more.", [("stop", {})]),
    ("Say <tool_call>.\n\n" + call("stop"), "Say <tool_call>.", [("stop", {})]),
    (call("add", x="<tool_call>"), None, [("add", {"x": "<tool_call>"})]),
    ('<tool_call>{"name": "stop"}\n' + call("add", x=1), None, [("stop", {}), ("add", {"x": 1})]),
    ('<tool_call>[{"name": "stop"}]\n{"name": "stop"}</tool_call>', None, [("stop", {})] * 2),
    ('{"name": "add", "arguments": {"x": 1}}', None, [("add", {"x": 1})]),
    ('```json\n{"name": "stop", "arguments": {}}\n {"name": "stop", "arguments": {}}\n```\n', None,
     [("stop", {})] * 2),
    ('{"name": "stop", "arguments": {}}\n```', None, [("stop", {})]),
    ('[\n {"name": "add", "arguments": {"x": 1}},\n{"name": "stop", "arguments": {}}]\n', None,
     [("add", {"x": 1}), ("stop", {})]),
    *(
        (text, text, [])
        for text in (
            "a <tool_call", "<tool_call>", "x\n<tool_call>\n</tool_call>\n", call("delete"),
            '<tool_call>{"name": "add", "arguments": "x"}</tool_call>',
            '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>',
            '<tool_call>{"name": "add", "arguments": {"x": NaN}}</tool_call>',
            '<tool_call>{"name": "add", "parameters": {"x": 1}}</tool_call>',
            '<tool_call>{"name": "add", "arguments": {"x": "\\ud83d"}}</tool_call>',
            '<tool_call>{"name": "add", "arguments": {"x": 1</tool_call>',
            "<tool_call>" + "[" * 300 + "</tool_call>", '{"name": "add"}', '{"x": "arguments"} ',
            '{"name": "add", "arguments": {}} and', '```json\n[]\n```', "``` a", "{", "5",
            "[", "[1]", "[ a", "[[" + call("x") + "]]",
            '```\n{"name": "stop", "arguments": {}}\n```',
        )
    ),
]  # fmt: skip


@contextmanager
def saying(backbone: Backbone, text: str) -> Iterator[None]:
    """Let the only row that runs be this text, whatever the model would write."""
    tokenizer = backbone.require_tokenizer()
    left = iter([*backbone.encode(text), *[tokenizer.eos_token_id] * 2])

    def write(module: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        forced = logits * 0
        forced[..., next(left)] = 1
        return forced

    hook = backbone.projection.register_forward_hook(write)
    try:
        yield
    finally:
        hook.remove()


def asked(server: Any, text: str, streamed: bool, **fields: Any) -> dict[str, Any]:
    """The message of an answer whose model writes a text, its end and usage."""
    body = {"messages": [USER], "tools": TOOLS, "max_tokens": 900, "temperature": 0, **fields}
    with saying(server.backbone, text):
        document = answered(server.url, CHAT, body, streamed)
    (choice,) = document["choices"]
    usage = document["usage"]
    return {**choice["message"], "finish": choice["finish_reason"], "usage": usage}


def calls_of(message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found = message.get("tool_calls", [])
    assert len({one["id"] for one in found}) == len(found)
    assert all(one["type"] == "function" for one in found)
    functions = [one["function"] for one in found]
    return [(one["name"], json.loads(one["arguments"])) for one in functions]


@pytest.mark.parametrize("streamed", [False, True])
def test_calls_are_told_from_content(server: Any, streamed: bool) -> None:
    """The forms of an answer at the servers; all replies are read below, without a model."""
    for text, content, calls in (REPLIES[0], *REPLIES[2:4], REPLIES[5], ("{", "{", [])):
        message = asked(server, text, streamed)
        assert (message["role"], message["content"]) == ("assistant", content), text
        assert calls_of(message) == calls, text
        assert ("tool_calls" in message) == bool(calls)
        assert message["finish"] == ("tool_calls" if calls else "stop")


def test_what_a_request_chooses_holds(server: Any) -> None:
    """A call that must come is begun behind the prompt; what must not be called is left out."""
    rest = call("add", x=1).removeprefix('<tool_call>\n{"name": "')
    required = asked(server, rest, False, tool_choice="required")
    assert calls_of(required) == [("add", {"x": 1})] and required["content"] is None
    named = {"type": "function", "function": {"name": "add"}}
    message = asked(server, ' {"x": 2}}\n</tool_call>', False, tool_choice=named)
    assert calls_of(message) == [("add", {"x": 2})]
    text = "no call"
    begun = '<tool_call>\n{"name": "'
    assert asked(server, text, False, tool_choice="required")["content"] == begun + text
    both = call("add", x=1) + call("stop")
    single = asked(server, both, False, parallel_tool_calls=False)
    assert calls_of(single) == [("add", {"x": 1})] and single["content"] is None
    none = asked(server, both, False, tool_choice="none")
    without = asked(server, both, False, tools=[])
    assert none["content"] == without["content"] == both and none["finish"] == "stop"
    assert none["usage"]["umim"] == without["usage"]["umim"]
    cut = asked(server, call("add", x=1), False, max_tokens=3)
    assert cut["finish"] == "length" and cut["content"] in call("add", x=1)


def test_a_client_sends_calls_and_results_back(server: Any) -> None:
    """As OpenAI's clients do: the message as it came, or as they parsed it, and the results."""
    first = asked(server, "I see.\n" + call("add", x=1), False)
    reply = {name: first[name] for name in ("role", "content", "refusal", "tool_calls")}
    reply["tool_calls"][0]["function"]["parsed_arguments"] = {"x": 1}
    user, result = {**USER, "name": "ann"}, {"role": "tool", "name": "add", "content": '{"sum": 3}'}
    result["tool_call_id"] = reply["tool_calls"][0]["id"]
    second = asked(server, "3.", False, messages=[user, reply, result])
    assert (second["content"], second["finish"]) == ("3.", "stop")
    function = {"name": "add", "arguments": {"x": 1}}  # templates want objects
    chat = [user, {**reply, "tool_calls": [{"type": "function", "function": function}]}, result]
    tokenizer = server.backbone.require_tokenizer()
    text = tokenizer.apply_chat_template(
        chat, tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    raw = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    count = second["usage"]["umim"]
    assert count["raw_prompt_tokens"] == raw > count["merged_prompt_tokens"]


PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "tools", "said"),
    [(PLAIN, TOOLS, "tools"), (PLAIN + "{# <tool_call></tool_call> #}", TOOLS, "tools"),
     (None, [], "chat template")],
)  # fmt: skip
def test_what_a_models_template_cannot_write_is_refused(
    umim: UMIM, template: str | None, tools: list[Any], said: str
) -> None:
    tokenizer = deepcopy(umim.backbone.require_tokenizer())
    tokenizer.chat_template = template
    plain = UMIM(replace(umim.backbone, tokenizer=tokenizer), umim.checkpoint)
    with in_thread(engine_server(plain).app(None)) as url:
        answer = post(url, CHAT, messages=[USER], tools=tools)
        assert answer.status_code == 400 and said in answer.json()["error"]["message"]
        assert "tokenizer." not in answer.text  # of Python
        if template is not None:
            assert post(url, CHAT, messages=[USER], tools=[], max_tokens=1).status_code == 200


def read(pieces: list[str]) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    calls = Calls.of(ChatPrompt.model_validate({"messages": [USER], "tools": TOOLS}), frozenset())
    assert calls is not None
    reply, content, found = Reply(calls), "", list[dict[str, Any]]()
    for number, text in enumerate(pieces):
        more, new = reply.add(text, None, number == len(pieces) - 1)
        content, found = content + more, found + new
    assert (reply.text, reply.calls) == (content, found)
    return content, calls_of({"tool_calls": found})


@pytest.mark.parametrize(("text", "content", "calls"), REPLIES)
def test_a_reply_is_read(text: str, content: str | None, calls: list[Any]) -> None:
    """In one piece, and token by token."""
    assert read([text]) == read(list(text)) == (content or "", calls)


@given(
    st.lists(st.sampled_from([*(reply for reply, _, _ in REPLIES), " ", "<", "a\n"]), min_size=1),
    st.lists(st.integers(0, 400), max_size=8),
)
def test_where_a_reply_is_cut_changes_nothing(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(places)]
    content, calls = read([*pieces, ""])
    whole = read([text])
    assert (content.rstrip(), calls) == (whole[0].rstrip(), whole[1])


def test_a_call_that_does_not_end_is_content() -> None:
    pieces = ["<tool_call>", *["x" * 1000] * 100, call("stop")]
    began = time.process_time()
    content, calls = read(pieces)
    assert content == "".join(pieces[:-1]) and calls == [("stop", {})]
    assert time.process_time() - began < 5


@pytest.mark.parametrize(("tokens", "at_once"), [(9, 3), (20_000, 1)])
def test_of_prompts_with_long_schemas_one_is_read_at_a_time(tokens: int, at_once: int) -> None:
    tokenizer = load_tokenizer("umim-docs-llama")
    tokenizer.chat_template = CHATML
    about = {**ADD["function"], "description": "sum " * tokens}
    tools = [{"type": "function", "function": about}]
    chat = ChatPrompt.model_validate({"messages": [USER], "tools": tools})
    reading, most = list[int](), list[int]()

    class Counted(PromptReader):
        def _read(self, *prompt: Any) -> PromptIds:
            reading.append(1)
            began = time.monotonic()
            while len(reading) < at_once and time.monotonic() - began < 10:
                time.sleep(0.01)
            time.sleep(0.1)  # others that should wait would come in
            most.append(len(reading))
            found = super()._read(*prompt)
            reading.pop()
            return found

    async def read() -> None:
        reader, calls = Counted(tokenizer), Calls.of(chat, frozenset())
        await asyncio.gather(*(reader.read(chat, None, calls) for _ in range(3)))

    asyncio.run(read())
    assert max(most) == at_once


CALLS = "<tool_call>{{ messages }}</tool_call>"


@pytest.mark.parametrize(
    ("template", "known"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{{ tools }}{{ messages }}<tool_call><function=f></tool_call>", False),
        ({"default": "x", "tool_use": CALLS}, True),
        ({"default": CALLS}, True),
        ({"default": CALLS, "tool_use": "x"}, False),
    ],
)
def test_a_template_says_how_calls_look(template: Any, known: bool) -> None:
    tokenizer = load_tokenizer("umim-docs-llama")
    tokenizer.chat_template = template
    assert call_marks(tokenizer) == (frozenset() if known else None)
    tokenizer.add_tokens(["<tool_call>", "<other>"], special_tokens=True)
    assert call_marks(tokenizer) == (frozenset({"<tool_call>"}) if known else None)  # to be shown
