"""The gateway before engines that go, and before ones that send what they like."""

from __future__ import annotations

import asyncio
import gzip
import json
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.served_models import exported_server, gateway
from support.servers import (
    CHAT,
    COMPLETIONS,
    HTTP,
    QUESTIONS,
    Served,
    in_thread,
    metric,
    post,
    wait_for,
)
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.errors import ConfigError
from umim_core.rules.ruleset import RuleSet
from umim_core.serving.gateway import Gateway, _documents, address_of
from umim_core.serving.guard import Limits
from umim_core.serving.openai_api import ApiError
from umim_core.serving.prompt_merger import PromptMerger


def test_only_line_ends_end_the_events_of_a_stream() -> None:
    text = "a\u2028b\u2029c\u0085d"
    sent = f'data: {{"text": "{text}"}}\r\n\r\ndata: [DONE]\n\n'.encode()

    async def read() -> list[dict[str, Any]]:
        async def pieces() -> AsyncIterator[bytes]:
            for byte in sent:
                yield bytes([byte])

        answer = httpx.Response(200, content=pieces())
        return [part async for part in _documents(answer, None)]

    assert asyncio.run(read()) == [{"text": text}]


@pytest.mark.full
def test_an_engine_that_dies_and_comes_back(export: Path) -> None:
    upstream = Served(export, "--base")
    try:
        body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 4}
        with in_thread(gateway(upstream.url, export).app(None)) as url:
            assert post(url, CHAT, **body).status_code == 200
            assert HTTP.get(url + "/health").status_code == 200
            long = {**body, "max_tokens": 1000, "temperature": 0.5, "stream": True}
            with HTTP.stream("POST", url + CHAT, json=long) as answer:
                lines = answer.iter_lines()
                next(lines)
                upstream.process.send_signal(signal.SIGKILL)
                last = [line for line in lines if line][-1]
            assert '"code":"upstream_unreachable"' in last
            upstream.end()
            for path in (CHAT, "/health"):
                answer = post(url, path, **body) if path == CHAT else HTTP.get(url + path)
                assert answer.status_code == 502
                assert answer.json()["error"]["code"] == "upstream_unreachable"
            with in_thread(exported_server(export).app(None), int(upstream.url.rpartition(":")[2])):
                assert post(url, CHAT, **body).status_code == 200
                assert HTTP.get(url + "/health").json() == {"status": "ok"}
    finally:
        upstream.process.kill()
        upstream.end()


def test_a_client_that_goes_ends_the_engines_work(export: Path) -> None:
    with (
        in_thread(exported_server(export).app(None)) as upstream,
        in_thread(gateway(upstream, export).app(None)) as url,
    ):
        body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 1000}
        body |= {"temperature": 0.5, "stream": True}
        with HTTP.stream("POST", url + CHAT, json=body) as answer:
            next(answer.iter_lines())
        wait_for(upstream, "umim_rows_running", 0)
        assert metric(upstream, "umim_generated_tokens_total") < 1000


USER = {"role": "user", "content": QUESTIONS[0]}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    COMPLETIONS: {"prompt": QUESTIONS[0]},
}
GOOD = {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}], "usage": {"x": 1}}


class OddEngine(ThreadingHTTPServer):
    """Answers whatever it is told; keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.answers: dict[str, bytes] = {}
        self.bodies: list[dict[str, Any]] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Answering(BaseHTTPRequestHandler):
    server: OddEngine

    def do_GET(self) -> None:
        if size := int(self.headers.get("content-length", 0)):
            self.server.bodies.append(json.loads(self.rfile.read(size)))
        with suppress(OSError):
            self.wfile.write(self.server.answers.get(self.path, plain(b"{}")))

    do_POST = do_GET


def plain(body: bytes, head: bytes = b"content-type: application/json\r\n") -> bytes:
    size = b"content-length: %d\r\nconnection: close\r\n" % len(body)
    return b"HTTP/1.1 200 OK\r\n" + head + size + b"\r\n" + body


def events(*parts: bytes) -> bytes:
    lines = b"".join(b"data: " + part + b"\n\n" for part in parts)
    return plain(lines, b"content-type: text/event-stream\r\n")


@contextmanager
def odd(export: Path) -> Iterator[tuple[OddEngine, str]]:
    with OddEngine() as engine, in_thread(gateway(engine.url, export).app(None)) as url:
        yield engine, url


@pytest.fixture(scope="module")
def pair(export: Path) -> Iterator[tuple[OddEngine, str]]:
    with odd(export) as both:
        yield both


def choice(**fields: Any) -> bytes:
    return json.dumps({**GOOD, "choices": [{**GOOD["choices"][0], **fields}]}).encode()


ODD = [
    b"", b"[]", b"null", b"<html>", b"[" * 9_000, b'{"choices": 5}', b'{"choices": [5]}',
    b'{"choices": [{"text": "\\ud800"}]}', b'{"usage": {"x": NaN}}', b'{"usage": {"x": 1e999}}',
    choice(index=[0]), choice(index=-1), choice(index="0"), choice(text=5), choice(text={}),
    choice(finish_reason=["stop"]),
]  # fmt: skip


@pytest.mark.parametrize("body", ODD)
def test_what_cannot_be_translated_is_502(pair: tuple[OddEngine, str], body: bytes) -> None:
    engine, url = pair
    engine.answers[COMPLETIONS] = plain(body)
    answer = post(url, CHAT, messages=[USER])
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_malformed")
    engine.answers[COMPLETIONS] = events(json.dumps(GOOD).encode(), body, b"[DONE]")
    answer = post(url, CHAT, messages=[USER], stream=True)
    last = [line for line in answer.text.split("\n") if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "upstream_malformed"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "said", [{}, {"choices": []}, {"error": "no room"}, {"error": {"message": "no room"}}]
)
def test_an_answer_without_choices_is_502(
    pair: tuple[OddEngine, str], path: str, said: dict[str, Any]
) -> None:
    engine, url = pair
    engine.answers[COMPLETIONS] = plain(json.dumps(said).encode())
    answer = post(url, path, **BODIES[path])
    assert answer.status_code == 502
    assert answer.json() == said if "error" in said else "upstream_malformed" in answer.text


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("merged", [True, False])
def test_an_error_that_is_null_ends_no_stream(
    pair: tuple[OddEngine, str], path: str, merged: bool
) -> None:
    engine, url = pair
    part = json.dumps({**GOOD, "error": None}).encode()
    engine.answers[path] = engine.answers[COMPLETIONS] = events(part, part, b"[DONE]")
    headers = {"x-umim-merge": "on" if merged else "off"}
    answer = post(url, path, headers, **BODIES[path], stream=True)
    assert answer.text.count('"choices"') == 2 and answer.text.endswith("[DONE]\n\n")


BOMB = gzip.compress(bytes(200 << 20))
GZIP = b"content-encoding: gzip\r\n"
ANSWERS: dict[str, tuple[bytes, bool]] = {  # and whether a stream is asked for
    "packed": (plain(BOMB, GZIP), False),
    "packed stream": (plain(BOMB, GZIP + b"content-type: text/event-stream\r\n"), True),
    "endless": (plain(b"[" + b"1," * (30 << 20)), False),
    "endless stream": (events(b"x" * (60 << 20)), True),
    "no status": (b"HTTP/1.1 799 Odd\r\ncontent-length: 0\r\n\r\n", False),
}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *((CHAT, name) for name in ANSWERS),
        *((COMPLETIONS, name) for name in ("packed", "endless stream")),
        *((path, name) for path in ("/v1/models", "/health") for name in ("packed", "no status")),
    ],
)
def test_an_engine_cannot_fill_the_memory(
    pair: tuple[OddEngine, str], path: str, name: str
) -> None:
    sent, streamed = ANSWERS[name]
    engine, url = pair
    engine.answers = {path: sent, COMPLETIONS: sent}
    before = psutil.Process().memory_info().rss
    body = BODIES.get(path)
    answer = post(url, path, **body, stream=streamed) if body else HTTP.get(url + path)
    assert "upstream_malformed" in answer.text
    assert psutil.Process().memory_info().rss - before < 150 << 20


def models(*lengths: object) -> bytes:
    data = [{"id": f"m{k}", "max_model_len": length} for k, length in enumerate(lengths)]
    return plain(json.dumps({"data": data}).encode())


@pytest.mark.parametrize(
    ("answer", "model", "tokens"),
    [
        *((models(length), None, 1024) for length in (-5, 0, True, "9", None)),
        *((plain(body), None, 1024) for body in (b"<html>", b'{"data": 5}')),
        (b"HTTP/1.1 500 x\r\ncontent-length: 0\r\n\r\n", None, 1024),
        (b"garbage", None, 1024),
        (models(100), None, 100),
        (models(100), "", 100),
        (models(100, 200), "m1", 200),
        (models(100, None), "m1", 100),
        (models(100, 200), "other", 100),
        (models(10**9), None, 1024),
    ],
)
def test_what_an_engine_says_of_its_models_is_checked_and_forgotten(
    export: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes, model: str | None, tokens: int
) -> None:  # fmt: skip
    monkeypatch.setattr("umim_core.serving.gateway._KNOWN_SECONDS", 0.0)
    monkeypatch.setattr("umim_core.serving.gateway._UNKNOWN_SECONDS", 0.0)
    with odd(export) as (engine, url):
        for said, most in ((answer, tokens), (models(70), 70)):
            engine.answers = {"/v1/models": said, COMPLETIONS: plain(json.dumps(GOOD).encode())}
            body = {"messages": [USER], **({} if model is None else {"model": model})}
            reply = post(url, CHAT, **body)
            assert reply.status_code == 200
            assert reply.json()["model"] == (model or ("m0" if b'"m0"' in said else ""))
            asked = engine.bodies[-1]
            room = most - len(asked["prompt"])
            assert asked["max_tokens"] == (1024 if most == 1024 else room)
        one = HTTP.get(url + "/v1/models/m0")
        assert one.json() == {"id": "m0", "max_model_len": 70}
        engine.answers["/v1/models"] = plain(b'{"data": [{"id": ["m0"]}, {"id": {}}, {}]}')
        for name in ("a%2Fb", "m0"):
            assert HTTP.get(url + f"/v1/models/{name}").status_code == 404


REPLY = {"role": "assistant", "content": "Fine.", "refusal": None}
ECHOES: list[tuple[dict[str, Any], str]] = [
    ({"messages": [USER, REPLY, USER]}, ""),
    ({"messages": [{**USER, "content": [{"type": "text", "text": "a "}] * 2}, USER]}, ""),
    ({"modalities": ["text"], "functions": None, "chat_template_kwargs": {}}, ""),
    ({"echo": False, "reasoning": None}, ""),
    ({"add_generation_prompt": True, "continue_final_message": False}, ""),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"echo": True}, "echo"),  # of a completion: the whole prompt
    ({"thinking": {"type": "disabled"}}, "thinking"),
    ({"logprobs": True, "top_logprobs": 2}, "logprobs"),
    ({"roles": ["nobody"]}, "roles"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"messages": [{**REPLY, "tool_calls": [{"id": "1"}]}, USER]}, "messages"),
    ({"messages": [{**USER, "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    ({"messages": [{**USER, "role": 5}]}, "messages"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "reason"), ECHOES)
def test_chats_merge_unless_the_engine_must_see_them(
    pair: tuple[OddEngine, str], fields: dict[str, Any], reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    engine, url = pair
    engine.answers = dict.fromkeys((CHAT, COMPLETIONS), plain(json.dumps(GOOD).encode()))
    name = f'umim_prompts_unmerged_total{{reason="{reason}"}}'
    before = metric(url, name) if reason and name in HTTP.get(url + "/metrics").text else 0
    body = {"messages": [USER], "max_tokens": 3, **fields}
    assert post(url, CHAT, **body).status_code == 200
    asked = engine.bodies[-1]
    if reason:
        assert asked == body and metric(url, name) == before + 1
        assert reason in caplog.text and QUESTIONS[0] not in caplog.text
    else:
        assert asked["max_tokens"] == 3 and not set(fields) & set(asked)
        assert max(asked["prompt"]) >= 8192  # an id of a span


WRONG_IDS = ("08192", " 8192", "+8192", "8_192", "8192.0", "-1", "", "\u0668\u0661\u0669", "x")


def test_every_request_has_a_bias_against_the_ids_of_spans(export: Path) -> None:
    merger = PromptMerger.load(export)
    new = range(merger.vocab_size, merger.vocab_size + len(merger.rules))
    gate = gateway("http://127.0.0.1:1", export, masks=False)
    asked = {"prompt": [1], "logit_bias": {"7": 2.0, str(new[0]): 100}}
    bias = gate._masked(asked)["logit_bias"]
    assert bias == {"7": 2.0} | dict.fromkeys(map(str, new), -100.0)
    assert gateway("http://127.0.0.1:1", export)._masked(asked) == asked
    for wrong in (*({wrong: 200} for wrong in WRONG_IDS), "5", 1, [[5, 1]]):
        with pytest.raises(ApiError, match="logit_bias must be") as refused:
            gate._masked({"logit_bias": wrong})
        assert (refused.value.status, refused.value.param) == (400, "logit_bias")


def test_an_engine_that_takes_no_bias_is_named(export: Path) -> None:
    with OddEngine() as engine:
        engine.answers[COMPLETIONS] = plain(b"no logit_bias").replace(b"200 OK", b"400 Bad")
        for masks, status in ((False, 502), (True, 400)):
            with in_thread(gateway(engine.url, export, masks).app(None)) as url:
                answer = post(url, COMPLETIONS, prompt=QUESTIONS[0])
                assert answer.status_code == status
                assert ("--upstream-masks" in answer.text) is (status == 502)


def test_a_prompt_whose_merging_fails_is_sent_raw(export: Path) -> None:
    other = PromptMerger(RuleSet.from_spans([(1, 2)]), 10, 4)  # of a model with ten rows
    tokenizer = load_tokenizer(str(export))
    with OddEngine() as engine:
        engine.answers[COMPLETIONS] = plain(json.dumps(GOOD).encode())
        with in_thread(
            Gateway(address_of(engine.url), tokenizer, other, Limits()).app(None)
        ) as url:
            assert post(url, COMPLETIONS, prompt=QUESTIONS[0]).status_code == 200
            assert metric(url, 'umim_prompts_unmerged_total{reason="merging"}') == 1
        assert engine.bodies[-1]["prompt"] == tokenizer(QUESTIONS[0])["input_ids"]


@pytest.mark.parametrize(
    "upstream",
    [
        "ftp://user:PW@127.0.0.1", "http://user:PW@127.0.0.1", "http://PW@127.0.0.1",
        "http://127.0.0.1/?key=PW", "user:PW@127.0.0.1", "//u:PW@127.0.0.1", "PW", "http://",
        "http://127.0.0.1:PW", "http://127.0.0.1#PW", "http://u:PW%40@127.0.0.1:1",
        "\x00PW",
    ],
)  # fmt: skip
def test_an_upstreams_address_is_never_shown(export: Path, upstream: str) -> None:
    with pytest.raises(ConfigError) as refused:
        gateway(upstream, export)
    assert "PW" not in str(refused.value) and refused.value.__cause__ is None


@pytest.mark.parametrize("raw", [b'{"prompt": "a", "x": 1e999}', b'{"prompt": [1], "x": 1e999}'])
def test_numbers_that_are_none_stop_here(pair: tuple[OddEngine, str], raw: bytes) -> None:
    answer = HTTP.post(pair[1] + COMPLETIONS, content=raw)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
