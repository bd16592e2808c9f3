"""llama.cpp's server and vLLM run SmolLM2 with rows for spans as our own engine does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import (
    SERVERS,
    Prompt,
    Running,
    prompt_of,
    read_chats,
    running,
    with_spans,
)
from benchmarks.subjects import CHECKPOINT, GENERAL
from support.command_line import run_main
from support.processes import ROOT, need_model, output_of
from support.servers import CHAT, COMPLETIONS, Served
from umim_core import UMIM
from umim_core.serving.prompt_merger import PromptMerger
from umim_core.text.template_process import Chat

TEXT = GENERAL / "web-train.jsonl.gz"
PROMPTS = 4

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not TEXT.is_file(), reason="no general English (../shared/data/general)"),
]


@dataclass(frozen=True)
class Exported:
    directory: Path
    umim: UMIM
    merger: PromptMerger
    chats: list[Chat]
    prompts: list[Prompt]

    def reply(self, prompt: Prompt) -> str:
        """What our engine writes behind a prompt."""
        return self.umim.backbone.require_tokenizer().decode(prompt.wanted)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    need_model()
    directory = tmp_path_factory.mktemp("export") / "model"
    options = ("--text", TEXT, "--out", directory, "--gguf", "--dtype", "float32")
    run_main("export", CHECKPOINT, *options)
    umim, merger = with_spans(CHECKPOINT, directory), PromptMerger.load(directory)
    chats = list(read_chats(PROMPTS, ("web",)))
    return Exported(directory, umim, merger, chats, [prompt_of(c, umim, merger) for c in chats])


@pytest.fixture(scope="module", params=sorted(SERVERS))
def server(
    request: pytest.FixtureRequest, exported: Exported, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    engine = SERVERS[request.param]
    if not engine.program.exists():
        pytest.skip(f"needs `tools/engine.sh {request.param}`")
    with (
        (tmp_path_factory.mktemp("log") / request.param).open("wb") as log,
        running(engine, exported.directory, log) as process,
    ):
        yield process


@contextmanager
def served(*arguments: object) -> Iterator[str]:
    """Run ``umim serve`` for the length of a block; give its address."""
    server = Served(*arguments)
    try:
        yield server.url
    finally:
        server.process.terminate()
        server.end()


def gateway(upstream: str, directory: Path, *more: str) -> AbstractContextManager[str]:
    return served("--upstream", upstream, "--export", directory, *more)


of_vllm = pytest.mark.parametrize("server", ["vllm"], indirect=True)


@dataclass(frozen=True)
class TwoTurns:
    """A chat of two turns: the first reply and what it read, and what the second turn read."""

    text: str
    read: int
    cached: int
    new: int


def two_turns(python: Path, url: str, chat: Chat) -> TwoTurns:
    """Chat with OpenAI's client."""
    asked = json.dumps({"messages": list(chat), "then": "And in one word?", "tokens": 24})
    printed = output_of(python, ROOT / "tests/support/openai_chat.py", url, stdin=asked)
    first, second = json.loads(printed)
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    read = [turn["usage"]["prompt_tokens"] for turn in (first, second)]
    return TwoTurns(first["text"], read[0], cached, read[1] - cached)


def test_merged_ids_get_the_ids_that_our_engine_writes(server: Running, exported: Exported) -> None:
    raw = sum(len(prompt.raw) for prompt in exported.prompts)
    assert sum(len(prompt.merged) for prompt in exported.prompts) <= 0.8 * raw
    for prompt in exported.prompts:
        assert 1000 <= len(prompt.raw) <= 1700
        assert server.greedy(prompt.merged, len(prompt.wanted)) == prompt.wanted


def test_an_unchanged_client_chats_and_the_second_turn_reads_what_is_new(
    server: Running, exported: Exported
) -> None:
    plugin = server.engine is SERVERS["vllm"]
    masks = ["--upstream-masks"] if plugin else []
    python = server.engine.program.with_name("python")
    with gateway(server.url, exported.directory, *masks) as url:
        turns = [two_turns(python, url, exported.chats[0])]
    if plugin:
        turns.append(two_turns(python, server.url, exported.chats[1]))
    for prompt, turn in zip(exported.prompts, turns, strict=False):
        assert (turn.text, turn.read) == (exported.reply(prompt), len(prompt.merged))
        assert turn.cached > len(prompt.merged) - 32  # vLLM caches blocks of 32
        assert turn.new < 80


def test_the_same_client_chats_with_our_own_server(exported: Exported) -> None:
    engines = [engine.program for engine in SERVERS.values() if engine.program.exists()]
    if not engines:
        pytest.skip("needs OpenAI's client, as `tools/engine.sh llama` installs it")
    with (
        served(
            exported.directory, "--base", "--dtype", "float32", "--report-cached-tokens"
        ) as upstream,
        gateway(upstream, exported.directory, "--upstream-masks") as url,
    ):
        turn = two_turns(engines[0].with_name("python"), url, exported.chats[0])
    prompt = exported.prompts[0]
    assert (turn.text, turn.read) == (exported.reply(prompt), len(prompt.merged))
    assert turn.cached > len(prompt.merged) - 32
    assert turn.new < 80


def test_no_span_is_written_at_temperature_1_5(server: Running, exported: Exported) -> None:
    first = exported.merger.vocab_size
    last = first + len(exported.merger.rules)
    asked: dict[str, Any] = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    masked = dict(asked)
    if server.engine is SERVERS["llama"]:
        masked["logit_bias"] = [[span, False] for span in range(first, last)]
        written = server.greedy(exported.prompts[0].merged, 400, seed=0, **asked)
        assert max(written) >= first  # rows of zeros are no mask
    for seed in range(5):
        written = server.greedy(exported.prompts[seed % PROMPTS].merged, 400, seed=seed, **masked)
        assert len(written) == 400 and max(written) < first


@of_vllm
def test_vllm_merges_texts_and_leaves_ids_alone(server: Running, exported: Exported) -> None:
    text = str(exported.chats[0][0]["content"])
    ids = exported.umim.backbone.encode(text)
    for prompt, tokens in ((text, len(exported.merger.merge(ids))), (list(ids), len(ids))):
        answer = server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
        assert answer["usage"]["prompt_tokens"] == tokens


@of_vllm
def test_vllm_reads_a_chat_that_fits_only_merged(server: Running, exported: Exported) -> None:
    texts = [str(chat[0]["content"]) for chat in read_chats(8, ("web",))]
    chat: Chat = [{"role": "user", "content": "\n\n".join(texts)[:20000]}]
    prompt = prompt_of(chat, exported.umim, exported.merger)
    assert len(prompt.raw) > 4096 > len(prompt.merged) + 24
    body = {"messages": list(chat), "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = server.post(CHAT, body | {"return_token_ids": True})
    assert answer["usage"]["prompt_tokens"] == len(prompt.merged)
    assert answer["choices"][0]["token_ids"] == prompt.wanted


@of_vllm
def test_vllm_keeps_base_tokens_of_stops_bad_words_and_schemas(
    server: Running, exported: Exported
) -> None:
    prompt = exported.prompts[0]
    plain = exported.reply(prompt)
    stop = " ".join(plain.split()[3:6])  # words that the reply holds
    body = {"messages": list(exported.chats[0]), "max_tokens": 24, "temperature": 0}
    stopped = server.post(CHAT, body | {"stop": [stop]})["choices"][0]["message"]["content"]
    assert stopped == plain[: plain.index(stop)]
    encode = exported.umim.backbone.encode
    # vLLM bans a word behind a space only where that has as many ids as the word alone.
    words = [w for w in plain.split()[3:-1] if len(encode(w)) == len(encode(f" {w}")) == 1]
    word = max(words, key=len)
    banned = encode(f" {word}")
    choice = server.post(CHAT, body | {"bad_words": [word], "return_token_ids": True})["choices"][0]
    wanted, ids = prompt.wanted, choice["token_ids"]
    place = next(i for i in range(len(wanted)) if wanted[i : i + len(banned)] == list(banned))
    assert ids[:place] == wanted[:place]  # vLLM bans these ids: other ids may spell the word
    assert all(ids[i : i + len(banned)] != list(banned) for i in range(len(ids)))
    properties = {"subject": {"type": "string", "maxLength": 20}, "long": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    form = {"type": "json_schema", "json_schema": {"name": "summary", "schema": schema}}
    answer = server.post(CHAT, body | {"response_format": form, "max_tokens": 64})
    found = json.loads(answer["choices"][0]["message"]["content"])
    assert isinstance(found["long"], bool) and answer["usage"]["prompt_tokens"] == len(
        prompt.merged
    )
