"""Our own engine as a server: rows, queue, memory and text shared by many clients."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import numpy as np
import pytest
import torch

from support.served_models import engine_server
from support.servers import (
    CHAT,
    COMPLETIONS,
    HTTP,
    QUESTIONS,
    answered,
    in_thread,
    metric,
    post,
    wait_for,
)
from umim_core import UMIM
from umim_core.errors import GenerationError
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import Row
from umim_core.rules.matcher import PromptIds
from umim_core.serving.engine_server import EngineServer
from umim_core.serving.local_engine import BatchSizes, Job

PROMPT: Final = "Return the sum of the array elements over a given"
CLIENTS: Final = 32


def test_a_long_prompt_holds_nobody(umim: UMIM) -> None:
    """It is read while others are answered, and their own long ones are refused unread."""
    long = "word " * 30_000  # would take a second
    with in_thread(engine_server(umim).app(None)) as url, ThreadPoolExecutor(4) as pool:
        post(url, COMPLETIONS, prompt="a", max_tokens=1)  # the first one is slow
        asking = [pool.submit(post, url, COMPLETIONS, prompt=long, max_tokens=1) for _ in range(4)]
        while not all(one.done() for one in asking):
            began = time.process_time()  # what a busy machine does to others is no fault
            assert post(url, COMPLETIONS, prompt="a", max_tokens=1).status_code == 200
            assert time.process_time() - began < 2
        assert [one.result().status_code for one in asking] == [400] * 4


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("num_beams", 4, "got .'num_beams': 4"),
        ("min_p", 7.0, "min_p is out of range: .* got 7.0"),
        ("min_new_tokens", -1, "min_new_tokens is out of range: .* got -1"),
        ("suppress_tokens", ["a"], "suppress_tokens is out of range: .* got .'a'"),
        ("max_time", "soon", "max_time must be a number of seconds; got soon"),
        ("max_time", math.nan, "max_time must be a number of seconds; got nan"),
    ],
)
def test_settings_of_a_model_that_no_request_could_do_are_told_at_the_start(
    umim: UMIM, monkeypatch: pytest.MonkeyPatch, name: str, value: object, said: str
) -> None:
    monkeypatch.setattr(umim.backbone.model.generation_config, name, value)
    with pytest.raises(GenerationError, match=rf"{said}.* own generation_config\.json"):
        engine_server(umim)


def test_how_many_answers_come_is_for_the_request_to_say(
    umim: UMIM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(umim.backbone.model.generation_config, "num_return_sequences", 2)
    with in_thread(engine_server(umim).app(None)) as url:
        for asked in ({}, {"temperature": 0}, {"n": 2}):
            answer = post(url, COMPLETIONS, prompt=PROMPT, max_tokens=1, **asked).json()
            assert len(answer["choices"]) == asked.get("n", 1)


def test_what_clients_share_is_told_if_the_operator_says_so(umim: UMIM) -> None:
    for told in (False, True):
        with in_thread(engine_server(umim, report_cached=told).app(None)) as url:
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
        self._step = held.engine._batch.step
        held.engine._batch.step = self.step  # type: ignore[method-assign]

    def step(self) -> list[Row]:
        self._steps += 1
        if self._steps > self._free:
            assert self._open.wait(120)
        return self._step()

    def open(self) -> None:
        self._open.set()


LONG = {"prompt": PROMPT, "max_tokens": 1000, "temperature": 0}  # a sample may end at once


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_goes_frees_its_row(umim: UMIM, streamed: bool) -> None:
    held = engine_server(umim, sizes=BatchSizes(max_rows=1, max_waiting=4))
    gate = Gate(held)
    with in_thread(held.app(None)) as url:
        if streamed:
            body = {**LONG, "stream": True}
            with HTTP.stream("POST", url + COMPLETIONS, json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                HTTP.post(url + COMPLETIONS, json=LONG, timeout=httpx.Timeout(240, read=1))
        wait_for(url, "umim_requests_in_flight", 1)  # the one that asks
        gate.open()
        assert post(url, COMPLETIONS, prompt=PROMPT, max_tokens=2).status_code == 200
        assert metric(url, "umim_generated_tokens_total") <= 3 + 2


def test_too_many_requests_are_told_to_come_again(umim: UMIM) -> None:
    held = engine_server(umim, sizes=BatchSizes(max_rows=1, max_waiting=1))
    gate, asking = Gate(held), list[Any]()
    with in_thread(held.app(None)) as url, ThreadPoolExecutor(2) as pool:
        for waiting in (0, 1):
            asking.append(pool.submit(post, url, COMPLETIONS, **LONG | {"max_tokens": 3}))
            wait_for(url, "umim_rows_running", 1)
            wait_for(url, "umim_requests_waiting", waiting)
        answer = post(url, COMPLETIONS, prompt=PROMPT)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "overloaded"
        gate.open()
        assert [one.result().status_code for one in asking] == [200, 200]


def test_few_requests_pass_one_that_needs_more_rows(umim: UMIM) -> None:
    held = engine_server(umim, sizes=BatchSizes(max_rows=4, max_waiting=64))
    order: list[str] = []

    def ask(name: str, **body: Any) -> None:
        post(url, COMPLETIONS, **LONG | {"max_tokens": 1} | body)
        order.append(name)

    gate = Gate(held)
    with in_thread(held.app(None)) as url, ThreadPoolExecutor(32) as pool:
        pool.submit(ask, "long", max_tokens=40)
        wait_for(url, "umim_rows_running", 1)
        pool.submit(ask, "four", n=4, temperature=1, seed=0)
        wait_for(url, "umim_requests_waiting", 1)
        for _ in range(30):
            pool.submit(ask, "one")
        gate.open()
        pool.shutdown()
        before = order[: order.index("four")]
        assert 0 < before.count("one") <= 16 + 4


def no_memory(kind: str) -> None:
    """Ask for more memory than there is, of what allocates in a forward."""
    if kind == "device":  # no test machine has one
        raise torch.OutOfMemoryError
    torch.empty(1 << 50) if kind == "torch" else np.empty(1 << 57)


@pytest.mark.parametrize("kind", ["device", "torch", "numpy"])
def test_without_memory_only_the_requests_concerned_fail(umim: UMIM, kind: str) -> None:
    full = engine_server(umim, sizes=BatchSizes(max_rows=2))
    forwards: list[int] = []  # rows of each
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    answers: list[httpx.Response] = []
    with in_thread(full.app(None)) as url, ThreadPoolExecutor(1) as pool:

        def fail(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            forwards.append(len(inputs[0]))
            if len(forwards) == 6:  # a prompt, after another one and four tokens
                no_memory(kind)
            if len(forwards) == 11:  # a token of the two
                wait_for(url, "umim_requests_waiting", 1)
                no_memory(kind)

        hook = umim.backbone.model.model.layers[-1].register_forward_pre_hook(fail)
        try:
            before, kept = post(url, COMPLETIONS, **body), full.engine._batch._store
            assert kept.bytes > 0
            answers.append(post(url, COMPLETIONS, **body))
            assert kept.bytes == metric(url, "umim_rows_running") == 0
            # The seed of two rows that last: without one either may end before its fourth token.
            two = {**body, "n": 2, "max_tokens": 900, "temperature": 1, "seed": 0}
            asking = pool.submit(post, url, COMPLETIONS, **two)
            wait_for(url, "umim_rows_running", 2)
            after = post(url, COMPLETIONS, **body)
            answers.append(asking.result())
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
        assert HTTP.get(url + "/health").json() == {"status": "ok"}


def test_requests_that_fail_together_have_an_error_each(umim: UMIM) -> None:
    engine, events = engine_server(umim).engine, list[Any]()
    options = GenerateOptions(max_new_tokens=2)
    prompt = PromptIds(np.array([1, 2]), ())
    engine._running += [Job(prompt, options, False, (), frozenset(), events.extend) for _ in "ab"]
    engine._drop()
    assert [error.code for error in events] == ["out_of_memory"] * 2
    assert events[0] is not events[1] and not engine._running


def test_every_client_gets_its_own_answer(umim: UMIM) -> None:
    """Many at once, eight chats and seeds: no stream is lost, mixed or doubled."""
    words = ("axis", "shape", "dtype", "order", "value", "index", "array", "copy")
    chats = [
        [{"role": "user", "content": f"{QUESTIONS[b % 4]} Tell me about the {word}."}]
        for b, word in enumerate(words)
    ]
    sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "merge": "prompt", "raw_tail": 4}
    texts = [
        umim.generate(chat, max_new_tokens=12, seed=number, **sampled).text[0]
        for number, chat in enumerate(chats)
    ]
    assert len(set(texts)) == len(texts)

    def ask(number: int) -> str:
        body = {"messages": chats[number % 8], "max_tokens": 12, "seed": number % 8}
        return answered(url, CHAT, body)["choices"][0]["message"]["content"]

    served = engine_server(umim, sizes=BatchSizes(kept_bytes=0))
    with in_thread(served.app(None)) as url, ThreadPoolExecutor(CLIENTS) as pool:
        assert list(pool.map(ask, range(CLIENTS))) == texts * (CLIENTS // 8)
        assert metric(url, "umim_generated_tokens_total") <= CLIENTS * 12
        assert metric(url, "umim_rows_running") == 0
