"""``umim generate`` in this process: streaming, samples, chats, colours, pages and refusals."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from support.command_line import Umim
from support.tiny_models import tiny_model
from umim_core import UMIM
from umim_core.backbone.backbone import load_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.merging.merged_model import MergedModel

PROMPT = "w1 w2 w9 w3 w4 w5 w6 w7 w8 w9 w1"


class Received(io.StringIO):
    """A stdout, maybe a terminal, that remembers what it was given at a time."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.isatty = lambda: is_terminal  # type: ignore[method-assign]

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return len(text)


@pytest.fixture
def generate(umim: Umim, tiny_checkpoint: Path) -> Umim:
    """Run the command on the prompt with some options."""
    return partial(umim, "generate", PROMPT, "-c", tiny_checkpoint, "--max-new-tokens", "9")


@pytest.mark.parametrize(
    ("options", "terminal", "streams"),
    [
        (["--stream"], False, True),
        (["--no-stream"], False, False),
        ([], False, False),
        ([], True, True),
        (["--no-stream"], True, False),
    ],
)
def test_a_terminal_or_who_wants_them_gets_pieces(
    generate: Umim,
    tiny_umim: UMIM,
    monkeypatch: pytest.MonkeyPatch,
    options: Sequence[str],
    terminal: bool,
    streams: bool,
) -> None:
    received = Received(terminal)
    monkeypatch.setattr(sys, "stdout", received)
    assert generate(*options).code == 0
    text = tiny_umim.generate(PROMPT, max_new_tokens=9).text[0]
    assert "".join(received.pieces) == text + "\n"
    assert (len([piece for piece in received.pieces if piece.strip()]) > 1) == streams


def test_the_document_is_that_of_the_library(generate: Umim, tiny_umim: UMIM) -> None:
    options = {"raw_tail": 4, "decode_max_damage": math.inf, "logprobs": 2}
    out = tiny_umim.generate(PROMPT, max_new_tokens=9, **options)
    flags = ("--raw-tail", 4, "--decode-max-damage", "inf", "--logprobs", 2, "--json")
    flags += ("--dtype", "float32")
    found = json.loads(generate(*flags).out)
    assert set(found.pop("timings")) == {"first_token", "decode"}
    row = (
        *("ids", "generated_spans", "token_reduction", "gen_kv_reduction"),
        *("cumulative_kv_reduction", "cache_lengths", "stop_reason", "logprobs", "top_logprobs"),
    )
    wanted = {name: getattr(out.rows[0], name) for name in row} | {
        "text": out.text[0],
        "prompt_spans": [[0, 2], [3, 3]],  # w6 w7 w8 w9 reaches into the last four
        "merge": "all",
        "raw_tail": 4,
        "span_eviction": None,
        "unmerged": "",
    }
    assert found == json.loads(json.dumps(wanted))


def test_samples_are_those_of_the_library(generate: Umim, tiny_umim: UMIM) -> None:
    expected = tiny_umim.generate(PROMPT, max_new_tokens=9, do_sample=True, n=3, seed=5)
    found = json.loads(generate("--sample", "-n", 3, "--seed", 5, "--json").out)["samples"]
    assert [sample["ids"] for sample in found] == [list(ids) for ids in expected.ids]
    assert len({str(sample["ids"]) for sample in found}) > 1


# The system's part is w10 where nobody gives another; w11 comes before a message, w12 before the
# reply.
TEMPLATE = (
    "{% if messages[0].role != 'system' %}w10 {% endif %}{% for m in messages %}"
    "{{ 'w11 ' if m.role == 'user' else '' }}{{ m.content }} {% endfor %}w12"
)


@pytest.fixture(scope="module")
def chatty(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tiny_umim: UMIM,
) -> Path:
    """A checkpoint whose backbone has a chat template and samples by its own settings."""
    folder = tmp_path_factory.mktemp("chatty")
    model = tiny_model()
    model.generation_config.update(do_sample=True, temperature=50.0)
    model.save_pretrained(folder / "backbone")
    tiny_tokenizer.save_pretrained(folder / "backbone")
    (folder / "backbone" / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    backbone = load_backbone(str(folder / "backbone"))
    own = tiny_umim.merged_model
    made = Checkpoint.of(MergedModel(backbone, own.module, own.matcher))
    made.recommending("all").save(folder / "merge")
    return folder / "merge"


@pytest.fixture
def chat(umim: Umim, chatty: Path) -> Umim:
    """Send a message of merging words, nine tokens for the reply."""
    options = ("--max-new-tokens", 9, "--dtype", "float32")
    return partial(umim, "generate", "w1 w2 w9", "-c", chatty, *options)


def test_a_length_that_the_model_names_counts_else_64_or_256(umim: Umim, chatty: Path) -> None:
    own = chatty.parent / "backbone" / "generation_config.json"
    said = json.loads(own.read_text())
    own.write_text(json.dumps(said | {"max_new_tokens": 5}))
    generate = partial(umim, "generate", "w1 w2 w9", "-c", chatty, "--greedy", "--json")
    for options in ((), ("--chat",)):
        found = json.loads(generate(*options).out)
        assert (len(found["ids"]), found["stop_reason"]) == (5, "length")
    own.write_text(json.dumps(said))
    assert "got 2 prompt positions + 64 new tokens" in generate().err
    assert "got 5 prompt positions + 256 new tokens" in generate("--chat").err


def test_a_chat_shows_template_message_and_token_reduction(chat: Umim) -> None:
    lines = chat("--chat", "--greedy").out.splitlines()
    assert lines[0].startswith("w10 w11[ w1 w2] w9 w12")
    assert lines[1].startswith("6 prompt tokens -> 5 units, token reduction 16.7%")


def test_a_reply_alone_is_that_of_the_library(chat: Umim, chatty: Path) -> None:
    message = [{"role": "system", "content": "w5"}, {"role": "user", "content": "w1 w2 w9"}]
    reply = UMIM.from_pretrained(chatty, dtype="float32").generate(
        message, max_new_tokens=9, do_sample=False
    )
    alone = chat("--chat", "--system", "w5", "--greedy", "--no-show")
    assert alone.out == reply.text[0] + "\n"
