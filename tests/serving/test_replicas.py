"""Two replicas by Ray Serve on loopback, one killed under load."""

from __future__ import annotations

import asyncio
import json
import pickle
import signal
import socket
import time
from collections import Counter
from typing import Final

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from flows.cli import app
from support.servers import COMPLETIONS, HTTP, QUESTIONS, in_thread
from umim_core import UMIM
from umim_core.errors import ClusterError, ConfigError
from umim_core.serving.engine_server import AnswerEngine, EngineServer
from umim_core.serving.guard import Limits
from umim_core.serving.local_engine import BatchSizes, Event
from umim_core.serving.openai_api import ApiError, CompletionBody

CLIENTS: Final = 12
NEW: Final = 48
PUSH_SECONDS: Final = 10.0  # between what a handle tells Ray Serve's controller
LOAD: Final = {"checkpoint": "umim-docs-llama", "name": "tiny", "dtype": "float64"}
SIZES: Final = BatchSizes(max_rows=4, max_waiting=2, kept_bytes=0)


def test_an_error_keeps_its_parts_on_its_way_from_a_replica() -> None:
    error = ApiError(400, "invalid_field", "n must be small", 9, "Lower it.", param="n")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301  its own
    assert (copy.status, copy.document()) == (400, error.document())


def body_of(number: int) -> dict[str, object]:
    """A request whose answer is its own: the seed decides it."""
    prompt = QUESTIONS[number % 4]
    return {"prompt": prompt, "max_tokens": NEW, "seed": number, "stream": number % 3 > 0}


async def ask(client: httpx.AsyncClient, number: int) -> tuple[str, str]:
    """How a request ended, and its text."""
    text = ""
    async with client.stream("POST", COMPLETIONS, json=body_of(number)) as answer:
        if answer.status_code != 200:
            error = json.loads(await answer.aread())["error"]
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), error
            return error["code"], ""
        if not body_of(number)["stream"]:
            return "whole", json.loads(await answer.aread())["choices"][0]["text"]
        lines = [line async for line in answer.aiter_lines() if line]
    for line in lines[:-1]:
        text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    last = lines[-1].removeprefix("data: ")
    return ("whole" if last == "[DONE]" else json.loads(last)["error"]["code"]), text


async def killed_under_load(url: str, own: list[str]) -> Counter[str]:
    """Let all clients ask until one replica was killed and both answer again."""
    ends, again = Counter[str](), asyncio.Event()
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def one(number: int) -> None:
            while not again.is_set():
                end, text = await ask(client, number)
                ends[end] += 1
                assert text == own[number] if end == "whole" else own[number].startswith(text)
                await asyncio.sleep(0.5 if end != "whole" else 0)

        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(one(number))
            while ends["whole"] < CLIENTS:
                await asyncio.sleep(0.05)
            first = replicas()
            assert len(first) == 2
            first[0].send_signal(signal.SIGKILL)
            end = time.monotonic() + 300
            while len([replica for replica in replicas() if replica != first[0]]) < 2:
                assert time.monotonic() < end
                assert (await client.get("/health")).status_code == 200
                await asyncio.sleep(0.2)
            again.set()
    return ends


async def events_of(engine: AnswerEngine) -> list[Event]:
    body = CompletionBody(prompt="a")
    return [event async for event in engine.events(body, None, True, 4)]


def replicas() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [one for one in children if one.name().startswith("ray::ServeReplica")]


@pytest.mark.full
def test_a_replica_that_is_killed_ends_its_own_answers_alone(umim: UMIM) -> None:
    pytest.importorskip("grpc", reason="Ray Serve is not installed")
    import ray
    from ray import serve

    from tasks.cluster.ray_cluster import ray_cluster
    from tasks.cluster.replicas import Replicas, replicated

    merge, tail = umim.checkpoint.config.recommended(None)
    sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "merge": merge, "raw_tail": tail}
    own = [
        umim.generate(QUESTIONS[number % 4], max_new_tokens=NEW, seed=number, **sampled).text[0]
        for number in range(CLIENTS)
    ]
    assert len(set(own)) == CLIENTS
    with ray_cluster(cpus=2, object_store_bytes=100 << 20):
        with (
            replicated(LOAD, SIZES, Replicas(cpus=0.5)) as engine,
            in_thread(EngineServer(engine, Limits()).app(None)) as url,
        ):
            ends = asyncio.run(killed_under_load(url, own))
            print(dict(ends))
            assert set(ends) == {"whole", "overloaded", "unavailable"}
            answer = HTTP.post(url + COMPLETIONS, json={"prompt": "a", "n": 17})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
            assert HTTP.get(url + "/v1/models").json()["data"][0]["max_model_len"] == 2048
            assert "umim_generated_tokens_total 0.0" not in HTTP.get(url + "/metrics").text
        absent, one = {"checkpoint": "nowhere/none"}, Replicas(1, cpus=0.5)
        with (
            pytest.raises(ClusterError, match="replicas must start"),
            replicated(absent, SIZES, one),
        ):
            pass
        with pytest.raises(SystemExit), replicated(LOAD, SIZES, one):
            raise SystemExit(1)  # as uvicorn does
        end = time.monotonic() + 300
        while serve.status().applications:
            assert time.monotonic() < end
            time.sleep(0.2)
    (refused,) = asyncio.run(events_of(engine))
    assert isinstance(refused, ApiError)
    assert (refused.status, refused.code) == (503, "unavailable")
    assert not asyncio.run(engine.alive())
    time.sleep(PUSH_SECONDS + 1)  # neither the requests above nor the handle itself wakes Ray
    assert not ray.is_initialized()


def test_a_port_that_is_taken_is_refused_before_replicas_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = CliRunner().invoke(app, ["serve", "--port", str(port)]).exception
    assert isinstance(refused, ConfigError)
    assert f"--port; got 127.0.0.1:{port}" in str(refused)
