"""Our own engine behind OpenAI's interface: a real server on loopback, against the library."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from support.servers import (
    CHAT,
    COMPLETIONS,
    QUESTIONS,
    in_thread,
    metric,
    post,
    stream,
    wait_for,
)
from umim_core import UMIM
from umim_core.inference.outputs import Row
from umim_core.serving.engine_server import EngineServer, LocalEngine, Served
from umim_core.serving.engine_worker import BatchSizes
from umim_core.serving.guard import Limits

PROMPT = "Return the sum of the array elements over a given"


def server(umim: UMIM, *, sizes: BatchSizes | None = None, **limits: Any) -> EngineServer:
    served = Served("tiny", umim.merged_model, "prompt", 4)
    bounds = Limits(**{"report_cached": True, **limits})
    return EngineServer(LocalEngine(served, sizes or BatchSizes()), bounds)


@pytest.fixture(scope="module")
def url(umim: UMIM) -> Iterator[str]:
    with in_thread(server(umim).app(None)) as address:
        yield address


def get(url: str, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.get(url + path, headers=headers, timeout=240)


def test_a_completion_is_the_librarys(umim: UMIM, url: str) -> None:
    document = post(url, COMPLETIONS, prompt=PROMPT, max_tokens=24, temperature=0).json()
    alone = umim.generate(PROMPT, max_new_tokens=24, merge="prompt", raw_tail=4)
    (choice,) = document["choices"]
    assert choice["text"] == alone.text[0]
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert document["object"] == "text_completion" and document["model"] == "tiny"
    raw = len(alone.prompt_ids[0])
    units = alone.cache_lengths[0][0]
    assert units < raw
    assert document["usage"]["umim"] == {"raw_prompt_tokens": raw, "merged_prompt_tokens": units}
    assert document["usage"]["completion_tokens"] == 24


def test_ids_and_the_opt_out_header_are_honoured(umim: UMIM, url: str) -> None:
    ids = umim.backbone.encode(PROMPT)
    body = {"prompt": ids, "max_tokens": 12, "temperature": 0}
    merged = post(url, COMPLETIONS, **body).json()
    raw = post(url, COMPLETIONS, {"x-umim-merge": "off"}, **body).json()
    for document, merge in ((merged, "prompt"), (raw, "none")):
        tail = 4 if merge == "prompt" else 0
        alone = umim.generate(ids, max_new_tokens=12, merge=merge, raw_tail=tail)
        assert document["choices"][0]["text"] == alone.text[0]
    assert raw["usage"]["prompt_tokens"] == len(ids) > merged["usage"]["prompt_tokens"]
    wrong = post(url, COMPLETIONS, {"x-umim-merge": "maybe"}, **body)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "invalid_header")


def test_four_turns_are_streamed_and_only_what_is_new_is_evaluated(umim: UMIM) -> None:
    chat: list[dict[str, str]] = []
    with in_thread(server(umim).app(None)) as url:
        held = evaluated = 0
        for turn, question in enumerate(QUESTIONS):
            chat.append({"role": "user", "content": question})
            body = {"messages": chat, "max_tokens": 16, "temperature": 0}
            text, count = stream(url, CHAT, body)
            alone = umim.generate(chat, max_new_tokens=16, merge="prompt", raw_tail=4)
            assert text == alone.text[0]
            assert count is not None
            units, reused = count["prompt_tokens"], count["prompt_tokens_details"]["cached_tokens"]
            evaluated += units - reused
            assert reused == held, f"turn {turn}"
            # The next turn holds this one and the reply, but for its last token.
            held = units + count["completion_tokens"] - 1
            chat.append({"role": "assistant", "content": text})
        assert metric(url, "umim_prompt_tokens_reused_total") > evaluated
        merged = metric(url, "umim_prompt_tokens_merged_total")
        assert evaluated == merged - metric(url, "umim_prompt_tokens_reused_total")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_ends_the_text_before_it(umim: UMIM, url: str, streamed: bool) -> None:
    whole = umim.generate(PROMPT, max_new_tokens=24, merge="prompt", raw_tail=4).text[0]
    stop = whole[20:26]
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "stop": [stop, "never there"]}
    if streamed:
        text, count = stream(url, COMPLETIONS, body)
    else:
        document = post(url, COMPLETIONS, **body).json()
        text, count = document["choices"][0]["text"], document["usage"]
        assert document["choices"][0]["finish_reason"] == "stop"
    assert text == whole[: whole.index(stop)]
    assert count is not None and count["completion_tokens"] < 24
    wait_for(url, "umim_rows_running", 0)


USER = {"role": "user", "content": "a private text"}
BAD: list[tuple[str, dict[str, Any], int, str, str | None]] = [
    (CHAT, {}, 400, "invalid_field", "messages"),
    (CHAT, {"messages": []}, 400, "invalid_field", "messages"),
    (CHAT, {"messages": "Hi"}, 400, "invalid_field", "messages"),
    (CHAT, {"messages": [{"content": "Hi"}]}, 400, "invalid_field", "messages.0.role"),
    (CHAT, {"tools": [{"type": "function"}]}, 400, "unsupported", "tools"),
    (CHAT, {"logprobs": True}, 400, "unsupported", "logprobs"),
    (CHAT, {"response_format": {"type": "json_object"}}, 400, "unsupported", "response_format"),
    (CHAT, {"whatever": 1}, 400, "unknown_field", "whatever"),
    (CHAT, {"temperature": 3}, 400, "invalid_field", "temperature"),
    (CHAT, {"temperature": 1e-40}, 400, "invalid_field", "temperature"),
    (CHAT, {"temperature": "hot"}, 400, "invalid_field", "temperature"),
    (CHAT, {"top_p": 0}, 400, "invalid_field", "top_p"),
    (CHAT, {"max_tokens": 0}, 400, "invalid_field", "max_tokens"),
    (CHAT, {"max_tokens": 10**9}, 400, "invalid_field", "max_tokens"),
    (CHAT, {"n": 17}, 400, "invalid_field", "n"),
    (CHAT, {"stop": [""]}, 400, "invalid_field", "stop.0"),
    (CHAT, {"stop": ""}, 400, "invalid_field", "stop"),
    (CHAT, {"stop": ["a", 5]}, 400, "invalid_field", "stop.1"),
    (
        CHAT,
        {"stream_options": {"include_usage": 1}},
        400,
        "invalid_field",
        "stream_options.include_usage",
    ),
    (CHAT, {"stream_options": {"x": 1}}, 400, "unknown_field", "stream_options.x"),
    *(
        (CHAT, {"messages": [USER, {**USER, **fields}]}, 400, code, f"messages.1.{param}")
        for fields, code, param in [
            ({"tool_calls": [{"id": "1"}]}, "unknown_field", "tool_calls"),
            ({"refusal": "a private no"}, "unknown_field", "refusal"),
            ({"role": 5}, "invalid_field", "role"),
            ({"content": 5}, "invalid_field", "content"),
            ({"content": {"str": 5}}, "invalid_field", "content"),
            ({"content": ["private"]}, "invalid_field", "content.0"),
            (
                {"content": [{"type": "image_url", "image_url": {"url": "x"}}]},
                "invalid_field",
                "content.0.type",
            ),
            ({"content": [{"type": "text"}]}, "invalid_field", "content.0.text"),
            (
                {
                    "content": [
                        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
                    ]
                },
                "unknown_field",
                "content.0.cache_control",
            ),
        ]
    ),
    (CHAT, {"messages": [USER] * 4097}, 400, "invalid_field", "messages"),
    (CHAT, {"messages": [{"content": ""}] * 4097}, 400, "invalid_field", "messages.0.role"),
    (CHAT, {"seed": -1}, 400, "invalid_request", None),
    (CHAT, {"model": "gpt-9"}, 404, "model_not_found", "model"),
    (COMPLETIONS, {"prompt": ["a", "b"]}, 400, "unsupported", "prompt"),
    (COMPLETIONS, {"prompt": [10**6]}, 400, "invalid_request", None),
    (COMPLETIONS, {"prompt": []}, 400, "invalid_field", "prompt"),
    (COMPLETIONS, {"prompt": 5}, 400, "invalid_field", "prompt"),
    (COMPLETIONS, {"prompt": [5, True]}, 400, "invalid_field", "prompt.1"),
    (COMPLETIONS, {"prompt": [5] * 40_000}, 400, "invalid_request", None),
    (COMPLETIONS, {"prompt": ""}, 400, "invalid_request", None),
    (COMPLETIONS, {"prompt": "a", "logprobs": 0}, 400, "unsupported", "logprobs"),
    (COMPLETIONS, {"prompt": [5] * 3000}, 400, "invalid_request", None),
]


@pytest.mark.parametrize(("path", "fields", "status", "code", "param"), BAD)
@pytest.mark.parametrize("streamed", [False, True])
def test_bad_requests_get_typed_errors(
    url: str, path: str, fields: dict[str, Any], status: int, code: str, param: str | None,
    streamed: bool,
) -> None:  # fmt: skip
    body = dict(fields)
    if path == CHAT and fields and "messages" not in fields:
        body["messages"] = [USER]
    answer = post(url, path, **body, stream=streamed)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), error
    assert param is None or error["param"] == param
    assert set(error) == {"message", "type", "param", "code"}
    assert "private" not in error["message"]


NOTHING: tuple[object, ...] = (None, [], {}, "")
NEUTRAL = [
    *({"messages": [{**USER, name: value}]} for value in NOTHING for name in (
        "tool_calls", "function_call", "audio", "reasoning_content", "refusal", "tool_call_id")),
    {"messages": [{"role": "assistant", "content": None, "tool_calls": []}, USER]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a private text",
                                                "cache_control": None}], "name": None}]},
    *({name: value} for value in NOTHING for name in ("tools", "audio", "logit_bias", "later")),
    {"tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]},
    {"stream_options": {"include_usage": None, "other": None}, "stop": None, "n": None},
    {"stream_options": None, "stop": [], "logprobs": False, "top_logprobs": 0},
]  # fmt: skip


@pytest.mark.parametrize("fields", NEUTRAL)
def test_what_asks_for_nothing_changes_nothing(url: str, fields: dict[str, Any]) -> None:
    body = {"max_tokens": 2, "temperature": 0, "messages": [USER]}
    answer = post(url, CHAT, **{**body, **fields})
    assert answer.status_code == 200, answer.text
    plain = [
        {"role": m["role"], "content": m["content"] or ""} for m in fields.get("messages", [USER])
    ]
    assert (
        answer.json()["choices"] == post(url, CHAT, **{**body, "messages": plain}).json()["choices"]
    )


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/models/tiny", 200, None),
        ("/v1/models/%74iny", 200, None),
        ("/v1/models/org%2Fother", 404, "model_not_found"),
        ("/v1/models/org/other", 404, "model_not_found"),
        ("/v1/nothing", 404, "unknown_path"),
        (CHAT, 405, "method_not_allowed"),
    ],
)
def test_models_and_paths_have_answers(url: str, path: str, status: int, code: str | None) -> None:
    answer = get(url, path)
    assert answer.status_code == status
    if code is None:
        assert answer.json() == get(url, "/v1/models").json()["data"][0]
    else:
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == (code, "invalid_request_error")


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b"\xff", b'{"a":NaN}', b"[" * 100_000, b'{"prompt":"\\ud800"}'],
)
def test_what_is_no_json_object_is_refused(url: str, raw: bytes) -> None:
    answer = httpx.post(url + CHAT, content=raw, timeout=240)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_large_messages_are_refused_by_name(umim: UMIM, url: str) -> None:
    message = {"role": "user", "content": "word " * 200_000}  # 1 MB
    answer = post(url, CHAT, messages=[message])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    assert "positions" in answer.json()["error"]["message"]
    with in_thread(server(umim, request_bytes=100_000).app(None)) as small:
        answer = post(small, CHAT, messages=[message])
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
        parts = (b"x" * 1000 for _ in range(200))  # in chunks, without an announced length
        answer = httpx.post(small + CHAT, content=parts, timeout=240)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")


def test_a_long_prompt_holds_nobody(umim: UMIM) -> None:
    """It is read while others are answered, and their own long ones are refused unread."""
    long = "word " * 30_000  # would take a second
    with in_thread(server(umim).app(None)) as url:
        answers: list[int] = []

        def ask() -> None:
            answers.append(post(url, COMPLETIONS, prompt=long, max_tokens=1).status_code)

        asking = [threading.Thread(target=ask) for _ in range(4)]
        for thread in asking:
            thread.start()
        while any(thread.is_alive() for thread in asking):
            began = time.monotonic()
            assert post(url, COMPLETIONS, prompt="a", max_tokens=1).status_code == 200
            assert time.monotonic() - began < 2
        assert answers == [400] * 4


def test_what_clients_share_is_told_if_the_operator_says_so(umim: UMIM) -> None:
    for told in (False, True):
        with in_thread(server(umim, report_cached=told).app(None)) as url:
            counts = [
                post(url, COMPLETIONS, prompt=PROMPT, max_tokens=1).json()["usage"]
                for _ in range(2)
            ]
            cached = [count["prompt_tokens_details"]["cached_tokens"] for count in counts]
            assert (cached[1] > 0) == told
            assert metric(url, "umim_prompt_tokens_reused_total") == sum(cached)


class Gate:
    """Holds a server's worker before a forward, the third say, until it is opened."""

    def __init__(self, held: EngineServer, free: int = 2) -> None:
        self._open, self._steps, self._free = threading.Event(), 0, free
        self._step = held.engine.worker._batch.step
        held.engine.worker._batch.step = self.step  # type: ignore[method-assign]

    def step(self) -> list[Row]:
        self._steps += 1
        if self._steps > self._free:
            assert self._open.wait(120)
        return self._step()

    def open(self) -> None:
        self._open.set()


LONG = {"prompt": PROMPT, "max_tokens": 1000, "temperature": 0}


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_goes_frees_its_row(umim: UMIM, streamed: bool) -> None:
    held = server(umim, sizes=BatchSizes(max_rows=1, max_waiting=4))
    gate = Gate(held)
    with in_thread(held.app(None)) as url:
        if streamed:
            body = {**LONG, "stream": True}
            with httpx.stream("POST", url + COMPLETIONS, json=body, timeout=240) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url + COMPLETIONS, json=LONG, timeout=httpx.Timeout(240, read=1))
        wait_for(url, "umim_requests_in_flight", 1)  # the one that asks
        gate.open()
        assert post(url, COMPLETIONS, prompt=PROMPT, max_tokens=2).status_code == 200
        assert metric(url, "umim_generated_tokens_total") <= 3 + 2


def test_too_many_requests_are_told_to_come_again(umim: UMIM) -> None:
    held = server(umim, sizes=BatchSizes(max_rows=1, max_waiting=1))
    gate = Gate(held)
    answers: list[int] = []

    def ask() -> None:
        answers.append(post(url, COMPLETIONS, prompt=PROMPT, max_tokens=3).status_code)

    with in_thread(held.app(None)) as url:
        asking = [threading.Thread(target=ask) for _ in range(2)]
        for thread, waiting in zip(asking, (0, 1), strict=True):
            thread.start()
            wait_for(url, "umim_rows_running", 1)
            wait_for(url, "umim_requests_waiting", waiting)
        answer = post(url, COMPLETIONS, prompt=PROMPT)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "overloaded"
        gate.open()
        for thread in asking:
            thread.join(120)
    assert answers == [200, 200]


def test_few_requests_pass_one_that_needs_more_rows(umim: UMIM) -> None:
    held = server(umim, sizes=BatchSizes(max_rows=4, max_waiting=64))
    order: list[str] = []

    def ask(name: str, **body: Any) -> None:
        post(url, COMPLETIONS, **{"prompt": PROMPT, "max_tokens": 1, **body})
        order.append(name)

    gate = Gate(held)
    with in_thread(held.app(None)) as url:
        threads = [threading.Thread(target=ask, args=("long",), kwargs={"max_tokens": 40})]
        threads[0].start()
        wait_for(url, "umim_rows_running", 1)
        four = {"n": 4, "temperature": 1, "seed": 0}
        threads.append(threading.Thread(target=ask, args=("four",), kwargs=four))
        threads[-1].start()
        wait_for(url, "umim_requests_waiting", 1)
        for _ in range(30):
            threads.append(threading.Thread(target=ask, args=("one",)))
            threads[-1].start()
        gate.open()
        for thread in threads:
            thread.join(120)
        before = order[: order.index("four")]
        assert 0 < before.count("one") <= 16 + 4


def no_memory(kind: str) -> None:
    """Ask for more memory than there is, of what allocates in a forward."""
    if kind == "device":  # no test machine has one
        raise torch.OutOfMemoryError
    torch.empty(1 << 50) if kind == "torch" else np.empty(1 << 57)


@pytest.mark.parametrize("kind", ["device", "torch", "numpy"])
def test_without_memory_only_the_requests_concerned_fail(umim: UMIM, kind: str) -> None:
    full = server(umim, sizes=BatchSizes(max_rows=2))
    forwards: list[int] = []  # rows of each
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    answers: list[httpx.Response] = []
    with in_thread(full.app(None)) as url:

        def fail(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            forwards.append(len(inputs[0]))
            if len(forwards) == 6:  # a prompt, after another one and four tokens
                no_memory(kind)
            if len(forwards) == 11:  # a token of the two
                wait_for(url, "umim_requests_waiting", 1)
                no_memory(kind)

        hook = umim.backbone.model.model.layers[-1].register_forward_pre_hook(fail)
        try:
            before, kept = post(url, COMPLETIONS, **body), full.engine.worker._batch._store
            assert kept.bytes > 0
            answers.append(post(url, COMPLETIONS, **body))
            assert kept.bytes == metric(url, "umim_rows_running") == 0
            # The seed of two rows that last: without one either may end before its fourth token.
            two = {**body, "n": 2, "max_tokens": 900, "temperature": 1, "seed": 0}
            asking = threading.Thread(target=lambda: answers.append(post(url, COMPLETIONS, **two)))
            asking.start()
            wait_for(url, "umim_rows_running", 2)
            after = post(url, COMPLETIONS, **body)
            asking.join(120)
        finally:
            hook.remove()
        assert forwards[10] == 2
        for answer in answers:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "out_of_memory")
            assert answer.headers["retry-after"] == "1"
        alone = umim.generate(PROMPT, max_new_tokens=5, merge="prompt", raw_tail=4)
        for answer in (before, after):
            assert answer.json()["choices"][0]["text"] == alone.text[0]
        assert metric(url, "umim_rows_running") == 0
        assert get(url, "/health").json() == {"status": "ok"}


def test_without_a_template_a_chat_is_refused(umim: UMIM) -> None:
    bare = deepcopy(umim.backbone.require_tokenizer())
    bare.chat_template = None
    plain = UMIM(replace(umim.backbone, tokenizer=bare), umim.checkpoint)
    with in_thread(server(plain).app(None)) as url:
        answer = post(url, CHAT, messages=[{"role": "user", "content": "Hi"}])
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        assert "chat template" in answer.json()["error"]["message"]
