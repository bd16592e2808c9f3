"""OpenAI's interface at `umim serve` and at a gateway, against the library."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from support.served_models import engine_server, gateway
from support.servers import CHAT, COMPLETIONS, HTTP, QUESTIONS, answered, in_thread, post
from umim_core import UMIM

Prompt = str | list[dict[str, str]]
USER = {"role": "user", "content": "a private text"}


def wanted(server: Any, prompt: Prompt, new: int) -> tuple[str, int, int]:
    """What a server should write to a prompt: text, raw and merged tokens."""
    alone = server.umim.generate(prompt, max_new_tokens=new, merge="prompt", raw_tail=4)
    return alone.text[0], len(alone.prompt_ids[0]), alone.cache_lengths[0][0]


def asked(prompt: Prompt, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Path and greedy body of a prompt."""
    path, name = (COMPLETIONS, "prompt") if isinstance(prompt, str) else (CHAT, "messages")
    return path, {name: prompt, "temperature": 0, **fields}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prompt", [QUESTIONS[0], [{"role": "user", "content": QUESTIONS[0]}]])
def test_an_answer_is_what_the_model_writes(server: Any, prompt: Prompt, streamed: bool) -> None:
    text, raw, merged = wanted(server, prompt, 8)
    assert merged < raw
    stop = text[2:5]
    for stops, shown, finish in (([], text, "length"), ([stop, "no"], None, "stop")):
        path, body = asked(prompt, max_tokens=8, stop=stops)
        document = answered(server.url, path, body, streamed)
        (choice,), count = document["choices"], document["usage"]
        found = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        assert (choice["index"], choice["finish_reason"]) == (0, finish)
        kind = "text_completion" if path == COMPLETIONS else "chat.completion"
        assert document["object"] == kind
        assert found == (text[: text.index(stop)] if shown is None else shown)
        assert count["prompt_tokens"] == merged
        assert count["umim"] == {"raw_prompt_tokens": raw, "merged_prompt_tokens": merged}
        assert (count["completion_tokens"] == 8) == (finish == "length")
    path, body = asked(prompt, max_tokens=8, n=2, seed=1)
    same = post(server.url, path, **body).json()["choices"]
    assert [choice.get("text") or choice["message"]["content"] for choice in same] == [text] * 2
    header = {"x-umim-merge": "off"}
    path, body = asked(prompt, max_tokens=1, stream=False)
    assert post(server.url, path, header, **body).json()["usage"]["prompt_tokens"] == raw
    wrong = post(server.url, path, {"x-umim-merge": "maybe"}, **body)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "invalid_header")


def test_four_turns_evaluate_only_what_is_new(server: Any) -> None:
    chat: list[dict[str, str]] = []
    held = 0
    for turn, question in enumerate(QUESTIONS):
        chat.append({"role": "user", "content": question})
        path, body = asked(chat, max_tokens=12)
        document = answered(server.url, path, body)
        text, count = document["choices"][0]["message"]["content"], document["usage"]
        said, _, merged = wanted(server, chat, 12)
        assert text == said
        if turn:
            assert count["prompt_tokens_details"]["cached_tokens"] == held, f"turn {turn}"
        # The next turn holds this one and the reply, but for its last token.
        held = merged + count["completion_tokens"] - 1
        chat.append({"role": "assistant", "content": text})


def test_ids_merge_only_where_a_checkpoint_runs(server: Any) -> None:
    text, raw, merged = wanted(server, QUESTIONS[0], 12)
    ids = server.backbone.encode(QUESTIONS[0])
    answer = post(server.url, COMPLETIONS, prompt=ids, max_tokens=12, temperature=0).json()
    here = server.backbone is server.umim.backbone
    assert answer["usage"]["prompt_tokens"] == (merged if here else raw)
    assert not here or answer["choices"][0]["text"] == text


def part(**fields: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": "a", **fields}]}


TOOLS = [{"type": "function", "function": {"name": "add"}}]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


# What a client that writes JSON cannot follow: types, constants and arguments of Python.
PYTHON = re.compile(
    r"got (dict|list|str|bool|True|False|None)\b|dictionary|max_new_tokens|[a-z]=|tokenizer\."
)
TOO_LONG = "context_length_exceeded"
EITHER = " must be a text or a list; got "
CHOICE = "tool_choice must be none, auto, required or an object; got "
FUNCTION = "tool_choice must have a function exactly when its type is function; got "
# Fields of a body, how it is refused, and the field at fault, with what is said of it.
BAD: list[tuple[str, dict[str, Any], str, str | None]] = [
    *((CHAT, {name: value}, "invalid_field", name) for name, value in (
        ("messages", None), ("messages", []), ("messages", "Hi"),
        ("tool_choice", "required"), ("temperature", 3), ("temperature", 1e-40),
        ("temperature", "hot"), ("top_p", 0), ("top_k", -1), ("min_p", 2), ("n", 17), ("stop", ""),
        ("repetition_penalty", 0), ("max_tokens", 0), ("max_tokens", 10**9))),
    (CHAT, {"messages": [USER] * 4097}, "invalid_field", "messages must have at most 4096 entries"),
    (CHAT, {"messages": [1]}, "invalid_field", "messages.0 must be an object; got 1"),
    (CHAT, {"messages": [{"content": "Hi"}]}, "invalid_field",
     "messages.0.role must be given; got nothing. Add it."),
    (CHAT, {"tools": [{"type": "function"}]}, "invalid_field", "tools.0.function"),
    *((CHAT, {"tools": [{"type": "function", "function": {"name": "add", "parameters": value}}]},
       "invalid_field", "tools.0.function.parameters must be an object; got ")
      for value in (5, "private", [1])),
    *((CHAT, {"tools": TOOLS, "tool_choice": choice}, "invalid_field", CHOICE)
      for choice in (5, "maybe", "function")),
    (CHAT, {"tools": TOOLS, "tool_choice": named("maybe")}, "invalid_field", "tool_choice"),
    *((CHAT, {"tools": TOOLS, "tool_choice": choice}, "invalid_field", FUNCTION)
      for choice in ({"type": "function"}, {**named("add"), "type": "auto"})),
    (CHAT, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}}, "invalid_field",
     "tool_choice.function.name"),
    (CHAT, {"response_format": {"type": "json_object"}}, "unsupported", "response_format"),
    (CHAT, {"whatever": 1}, "unknown_field", "whatever"),
    (CHAT, {"roles": ["nobody"]}, "invalid_field", "roles.0"),
    (CHAT, {"roles": ["user", "user"]}, "invalid_field", "roles must name each role once; got "),
    (CHAT, {"max_tokens": 1, "max_completion_tokens": 10**9}, "invalid_field", None),
    (CHAT, {"max_tokens": True}, "invalid_field", "max_tokens"),
    (CHAT, {"stop": [""]}, "invalid_field", "stop.0"),
    (CHAT, {"stop": 5}, "invalid_field", "stop" + EITHER),
    (CHAT, {"stop": ["a", 5]}, "invalid_field", "stop.1"),
    (CHAT, {"stream_options": {"include_usage": 1}}, "invalid_field",
     "stream_options.include_usage"),
    (CHAT, {"stream_options": {"x": 1}}, "unknown_field", "stream_options.x"),
    *(
        (CHAT, {"messages": [USER, {**USER, **fields}]}, code, f"messages.1.{param}")
        for fields, code, param in [
            ({"tool_calls": [{"id": "1"}]}, "invalid_field", "tool_calls.0.function"),
            ({"tool_calls": [{"id": "1", "function": {"name": "add", "arguments": "[1]"}}]},
             "invalid_field", "tool_calls.0.function.arguments"),
            ({"tool_calls": [{"id": "1", "function": {"name": "add", "arguments": "{private"}}]},
             "invalid_field", "tool_calls.0.function.arguments must hold JSON; got a text."),
            ({"tool_calls": [{"id": "1", "function": {"name": "add", "arguments": {"x": 1}}}]},
             "invalid_field",
             "tool_calls.0.function.arguments must be a text that holds JSON; got an object"),
            ({"refusal": "a private no"}, "unknown_field", "refusal"),
            ({"role": 5}, "invalid_field", "role"),
            ({"content": 5}, "invalid_field", "content" + EITHER),
            ({"content": {"str": 5}}, "invalid_field", "content"),
            ({"content": ["private"]}, "invalid_field", "content.0"),
            (part(type="image_url"), "invalid_field",
             "content.0.type must be 'text'; got another text"),
            (part(text=None), "invalid_field", "content.0.text"),
            (part(cache_control={"type": "x"}), "unknown_field", "content.0.cache_control"),
        ]
    ),
    (CHAT, {"messages": [{"content": ""}] * 4097}, "invalid_field", "messages.0.role"),
    (CHAT, {"messages": [{**USER, "content": "word " * 200_000}]}, TOO_LONG, None),
    (CHAT, {"verbosity": "low"}, "unsupported", "verbosity"),
    (CHAT, {"model": "gpt-9"}, "model_not_found", "model"),
    *((CHAT, {"model": name}, "invalid_field", "model") for name in ([["a"]], {"a": 1}, 5)),
    (COMPLETIONS, {"prompt": ["a", "b"]}, "unsupported", "prompt"),
    (COMPLETIONS, {"prompt": [10**6]}, "invalid_request", None),
    (COMPLETIONS, {"prompt": [10**30]}, "invalid_field", "prompt.0"),
    (COMPLETIONS, {"prompt": []}, "invalid_field", "prompt"),
    (COMPLETIONS, {"prompt": 5}, "invalid_field", "prompt" + EITHER),
    (COMPLETIONS, {"prompt": [5, True]}, "invalid_field", "prompt.1"),
    (COMPLETIONS, {"prompt": [5] * 40_000}, TOO_LONG, None),
    (COMPLETIONS, {"prompt": [5] * 3000}, TOO_LONG, None),
    (COMPLETIONS, {"prompt": ""}, "invalid_request", None),
    (COMPLETIONS, {"prompt": "a", "logprobs": 0}, "unsupported", "logprobs"),
]  # fmt: skip
RAW_BODIES = (
    b"", b"{", b"[]", b"null", b"\xff", b'{"a":NaN}', b"[" * 100_000, b'{"prompt":"\\ud800"}'
)  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "code", "param"), BAD)
def test_bad_requests_get_typed_errors(
    server: Any, path: str, fields: dict[str, Any], code: str, param: str | None
) -> None:
    body = fields if path == COMPLETIONS else {"messages": [USER], **fields}
    for streamed in (False, True):
        answer = post(server.url, path, **body, stream=streamed)
        error = answer.json()["error"]
        status = 404 if code == "model_not_found" else 400
        assert (answer.status_code, error["code"]) == (status, code), error
        field, *said = [None] if param is None else param.split(" must ")
        assert field is None or error["param"] == field
        assert not said or str(param) in error["message"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "private" not in error["message"] and not PYTHON.search(error["message"])


def test_broken_and_large_bodies_are_refused(server: Any, umim: UMIM, export: Path) -> None:
    for raw in RAW_BODIES:
        answer = HTTP.post(server.url + CHAT, content=raw)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_json")
        assert not PYTHON.search(error["message"])
    small: Any = engine_server(umim, request_bytes=1000)
    if server.backbone is not server.umim.backbone:
        small = gateway("http://127.0.0.1:1", export, request_bytes=1000)
    with in_thread(small.app(None)) as url:
        parts = (b"x" * 100 for _ in range(20))  # in chunks, without an announced length
        for content in (b"x" * 2000, parts):
            answer = HTTP.post(url + CHAT, content=content)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")


NOTHING: list[Any] = [None, [], {}, ""] * 4


def each(*names: str) -> list[dict[str, Any]]:
    """Two values that ask for nothing for every name, and every value for some names."""
    return [{name: NOTHING[n + k]} for n, name in enumerate(names) for k in (0, 2)]


NEUTRAL: list[dict[str, Any]] = [
    *({"messages": [{**USER, **field}]} for field in each(
        "tool_calls", "function_call", "audio", "reasoning_content", "refusal", "tool_call_id")),
    {"messages": [{"role": "assistant", "content": None, "tool_calls": []}, USER]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a private text",
                                                "cache_control": None}], "name": None}]},
    *each("tools", "audio", "logit_bias", "later", "tool_choice", "parallel_tool_calls"),
    {"tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"],
     "verbosity": "medium"},
    {"stream_options": {"include_usage": None, "other": None}, "stop": None, "n": None},
    {"stream_options": None, "stop": [], "logprobs": False, "top_logprobs": 0},
    {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "flex"},
    {"safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h",
     "prompt_cache_options": {"mode": "explicit"}},
    {"messages": [{**USER, "annotations": [{"type": "url_citation"}]}]},
    {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "a private text", "prompt_cache_breakpoint": {"mode": "explicit"}},
    ]}]},
]  # fmt: skip


def test_what_asks_for_nothing_changes_nothing(server: Any) -> None:
    body = {"max_tokens": 2, "temperature": 0, "messages": [USER]}
    before = post(server.url, CHAT, **body).json()
    for fields in NEUTRAL:
        answer = post(server.url, CHAT, **{**body, **fields})
        assert answer.status_code == 200, (fields, answer.text)
        if len(fields.get("messages", [USER])) == 1:
            assert answer.json()["choices"] == before["choices"], fields
            assert answer.json()["usage"]["umim"] == before["usage"]["umim"], fields


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/models/{name}", 200, None),
        ("/v1/models/%{first:x}{rest}", 200, None),
        ("/v1/models/org%2Fother", 404, "model_not_found"),
        ("/v1/models/org/other", 404, "model_not_found"),
        ("/v1/models/%00", 404, "model_not_found"),
        ("/v1/nothing", 404, "unknown_path"),
        ("/v1/nothing%00/", 404, "unknown_path"),
        (CHAT, 405, "method_not_allowed"),
    ],
)
def test_models_and_paths_have_answers(
    server: Any, path: str, status: int, code: str | None
) -> None:
    model = HTTP.get(server.url + "/v1/models").json()["data"][0]
    name = model["id"]
    path = path.format(name=name, first=ord(name[0]), rest=name[1:])
    answer = HTTP.get(server.url + path)
    assert answer.status_code == status
    if code is None:
        assert answer.json() == model
    else:
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == (code, "invalid_request_error")


def test_options_of_generate_have_their_names(umim: UMIM, servers: dict[str, Any]) -> None:
    chat = [{"role": "system", "content": QUESTIONS[1]}, {"role": "user", "content": QUESTIONS[0]}]
    options: dict[str, Any] = {"top_k": 9, "min_p": 0.01, "repetition_penalty": 1.3}
    options |= {"temperature": 0.9, "roles": ["system"]}
    url = servers["umim serve"].url
    answer = post(url, CHAT, messages=chat, max_tokens=12, seed=-3, **options).json()
    options |= {"seed": 2**64 - 3, "do_sample": True, "top_p": 1.0}
    alone = umim.generate(chat, max_new_tokens=12, merge="prompt", raw_tail=4, **options)
    assert answer["choices"][0]["message"]["content"] == alone.text[0]
    assert answer["usage"]["prompt_tokens"] == alone.cache_lengths[0][0]
    before = post(servers["gateway"].url, CHAT, messages=chat, max_tokens=1).json()["usage"]["umim"]
    both = {"messages": chat, "max_tokens": 1, "roles": ["user", "system"]}
    after = post(servers["gateway"].url, CHAT, **both).json()["usage"]["umim"]
    assert after["merged_prompt_tokens"] < before["merged_prompt_tokens"]
