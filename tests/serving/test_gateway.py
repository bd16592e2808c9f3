"""Gateway in front of a real engine on loopback: our own server, which takes ids."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerBase

from support.servers import (
    CHAT,
    COMPLETIONS,
    QUESTIONS,
    Served,
    in_thread,
    metric,
    stream,
    wait_for,
)
from umim_core.backbone.backbone import load_backbone
from umim_core.backbone.fingerprint import tokenizer_fingerprint
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.ruleset import RuleSet
from umim_core.serving.engine_app import EngineServer
from umim_core.serving.engine_worker import BatchSizes
from umim_core.serving.gateway import Gateway, _documents
from umim_core.serving.guard import Limits
from umim_core.serving.local_engine import LocalEngine
from umim_core.serving.local_engine import Served as ServedModel
from umim_core.serving.openai_api import ApiError
from umim_core.serving.prompt_merger import PromptMerger
from umim_core.serving.span_files import SpanTable

RAW_TAIL = 4


@pytest.fixture(scope="module")
def tokenizer(export: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(export))


@pytest.fixture(scope="module")
def engine(export: Path) -> Callable[[], EngineServer]:
    """Make a server of the exported model that reads what it is sent."""
    backbone = load_backbone(str(export), dtype="float64")
    served = ServedModel("model", MergedModel.without_merging(backbone), "none", 0)
    return lambda: EngineServer(LocalEngine(served, BatchSizes()), Limits(report_cached=True))


def gateway(upstream: str, export: Path, **limits: Any) -> Gateway:
    tokens = load_tokenizer(str(export))
    merger = PromptMerger.load(export, tokenizer_fingerprint=tokenizer_fingerprint(tokens))
    return Gateway(upstream, tokens, merger, Limits(**limits), upstream_masks=True)


@pytest.fixture(scope="module")
def upstream(engine: Callable[[], EngineServer]) -> Iterator[str]:
    with in_thread(engine().app(None)) as url:
        yield url


@pytest.fixture(scope="module")
def url(upstream: str, export: Path) -> Iterator[str]:
    with in_thread(gateway(upstream + "/v1/", export).app(None)) as address:
        yield address


def post(url: str, path: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, headers=headers, timeout=240)


def merged_ids(
    tokenizer: PreTrainedTokenizerBase, export: Path, chat: list[dict[str, str]]
) -> tuple[list[int], list[int]]:
    """Raw and merged ids of a chat, message by message and not by the gateway's own way."""
    merger = PromptMerger.load(export)
    raw: list[int] = []
    merged: list[int] = []

    def add(text: str, merge: bool) -> None:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        raw.extend(ids)
        merged.extend(merger.merge(ids) if merge else ids)

    for message in chat:
        add(f"<|im_start|>{message['role']}\n", False)
        add(message["content"], message["role"] == "user")
        add("<|endoftext|>", False)
        add("\n", False)
    add("<|im_start|>assistant\n", False)
    return raw, merged


def test_four_turns_are_merged_streamed_and_read_once(
    url: str, upstream: str, export: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    chat: list[dict[str, str]] = []
    held = 0
    for turn, question in enumerate(QUESTIONS):
        chat.append({"role": "user", "content": question})
        body = {"messages": chat, "max_tokens": 12, "temperature": 0}
        text, count = stream(url, CHAT, body)
        raw, merged = merged_ids(tokenizer, export, chat)
        alone = post(upstream, COMPLETIONS, prompt=merged, max_tokens=12, temperature=0).json()
        assert text == alone["choices"][0]["text"]
        assert count is not None and len(merged) < len(raw)
        both = {"raw_prompt_tokens": len(raw), "merged_prompt_tokens": len(merged)}
        assert count["umim"] == both
        assert count["prompt_tokens"] == len(merged)
        assert count["prompt_tokens_details"]["cached_tokens"] == held, f"turn {turn}"
        held = len(merged) + count["completion_tokens"] - 1
        whole = post(url, CHAT, **body).json()
        assert whole["object"] == "chat.completion"
        assert whole["choices"][0]["message"]["content"] == text
        assert whole["choices"][0]["finish_reason"] == "length"
        chat.append({"role": "assistant", "content": text})


def test_texts_merge_and_ids_stay_as_they_are(url: str, upstream: str, export: Path) -> None:
    body = {"max_tokens": 8, "temperature": 0}
    ids = load_tokenizer(str(export))(QUESTIONS[0])["input_ids"]
    merged = PromptMerger.load(export).merge(ids)
    text = post(url, COMPLETIONS, prompt=QUESTIONS[0], **body).json()
    assert text["choices"] == post(upstream, COMPLETIONS, prompt=merged, **body).json()["choices"]
    assert text["usage"]["umim"]["raw_prompt_tokens"] == len(ids)
    assert text["usage"]["prompt_tokens"] == len(merged) < len(ids)
    raw = post(url, COMPLETIONS, prompt=ids, **body).json()
    assert raw["usage"]["prompt_tokens"] == len(ids)


def test_the_header_leaves_a_request_as_it_came(url: str, upstream: str) -> None:
    body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 8}
    off = post(url, CHAT, {"x-umim-merge": "off"}, **body, temperature=0).json()
    raw = post(upstream, CHAT, **body, temperature=0).json()
    assert off["choices"] == raw["choices"]
    assert off["usage"]["prompt_tokens"] == raw["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "fields", [{"tools": [{"type": "function", "function": {"name": "f"}}]}, {"surprise": 1}]
)
def test_what_the_engine_refuses_is_its_own_answer(url: str, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **fields}
    answer = post(url, CHAT, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, next(iter(fields)))


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_no_tokens_are_not_the_default_number_of_tokens(url: str, name: str) -> None:
    answer = post(url, CHAT, messages=[{"role": "user", "content": "Hi"}], **{name: 0})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


def test_broken_bodies_stop_here(url: str, upstream: str, export: Path) -> None:
    answer = httpx.post(url + CHAT, content=b"{", timeout=240)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    for body in ({}, {"messages": []}, {"messages": [1]}, {"messages": "Hi"}):
        answer = post(url, CHAT, **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_field")
    large = {"messages": [{"role": "user", "content": "word " * 200_000}]}  # 1 MB
    answer = post(url, CHAT, **large)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    with in_thread(gateway(upstream, export, request_bytes=100_000).app(None)) as small:
        answer = post(small, CHAT, **large)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")


def test_a_prompt_whose_merging_fails_is_sent_raw(
    upstream: str, export: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    table = SpanTable.load(export)
    rules = RuleSet.from_spans([(1, 2)], tokenizer_fingerprint=table.fingerprint)
    other = PromptMerger(SpanTable(rules, 10, RAW_TAIL))  # of a model with ten rows
    chat = [{"role": "user", "content": QUESTIONS[0]}]
    with in_thread(
        Gateway(upstream, tokenizer, other, Limits(), upstream_masks=True).app(None)
    ) as url:
        body = {"messages": chat, "max_tokens": 6, "temperature": 0}
        document = post(url, CHAT, **body).json()
        raw, _ = merged_ids(tokenizer, export, chat)
        assert document["usage"]["prompt_tokens"] == len(raw)
        alone = post(upstream, COMPLETIONS, prompt=raw, max_tokens=6, temperature=0).json()
        assert document["choices"][0]["message"]["content"] == alone["choices"][0]["text"]
        assert metric(url, 'umim_prompts_unmerged_total{reason="merging"}') == 1


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
def test_an_engine_that_dies_and_comes_back(
    export: Path, engine: Callable[[], EngineServer]
) -> None:
    upstream = Served(export, "--base")
    try:
        body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 4}
        with in_thread(gateway(upstream.url, export).app(None)) as url:
            assert post(url, CHAT, **body).status_code == 200
            assert httpx.get(url + "/health").status_code == 200
            long = {**body, "max_tokens": 1000, "temperature": 0.5, "stream": True}
            with httpx.stream("POST", url + CHAT, json=long, timeout=240) as answer:
                lines = answer.iter_lines()
                next(lines)
                upstream.process.send_signal(signal.SIGKILL)
                last = [line for line in lines if line][-1]
            assert '"code":"upstream_unreachable"' in last
            upstream.end()
            for path in (CHAT, "/health"):
                answer = post(url, path, **body) if path == CHAT else httpx.get(url + path)
                assert answer.status_code == 502
                assert answer.json()["error"]["code"] == "upstream_unreachable"
            with in_thread(engine().app(None), int(upstream.url.rpartition(":")[2])):
                assert post(url, CHAT, **body).status_code == 200
                assert httpx.get(url + "/health").json() == {"status": "ok"}
    finally:
        upstream.process.kill()
        upstream.end()


def test_a_client_that_goes_ends_the_engines_work(
    export: Path, engine: Callable[[], EngineServer]
) -> None:
    with (
        in_thread(engine().app(None)) as upstream,
        in_thread(gateway(upstream, export).app(None)) as url,
    ):
        body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 1000}
        body |= {"temperature": 0.5, "stream": True}
        with httpx.stream("POST", url + CHAT, json=body, timeout=240) as answer:
            next(answer.iter_lines())
        wait_for(upstream, "umim_rows_running", 0)
        assert metric(upstream, "umim_generated_tokens_total") < 1000


def test_every_request_has_a_bias_against_the_ids_of_spans(
    export: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    merger = PromptMerger.load(export)
    new = range(merger.vocab_size, merger.vocab_size + merger.span_count)
    gate = Gateway("http://127.0.0.1:1", tokenizer, merger, Limits())
    asked = {"prompt": [1], "logit_bias": {"7": 2.0, str(new[0]): 100}}
    bias = gate._masked(asked)["logit_bias"]
    assert bias["7"] == 2.0 and asked["logit_bias"][str(new[0])] == 100
    assert {int(token) for token, value in bias.items() if value == -100.0} == set(new)
    listed = gate._masked({"logit_bias": [[5, False], [new[0], 100]]})["logit_bias"]
    assert listed == [[5, False], *([token, -100.0] for token in new)]
    for odd in ("5", 1, [5], [[5]]):
        with pytest.raises(ApiError, match="logit_bias must be") as refused:
            gate._masked({"logit_bias": odd})
        assert (refused.value.status, refused.value.param) == (400, "logit_bias")
    masking = Gateway("http://127.0.0.1:1", tokenizer, merger, Limits(), upstream_masks=True)
    assert masking._masked(asked) == asked
