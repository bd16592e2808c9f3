"""``umim generate`` in this process: streaming, samples, chats, colours, pages and refusals."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from support.command_line import Umim
from umim_core import UMIM
from umim_core.backbone.backbone import load_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.merging.merged_model import MergedModel

PROMPT = "w1 w2 w9 w3 w4 w5 w6 w7 w8 w9 w1"


class Received(io.BytesIO):
    """Remembers what it was given at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, data: object) -> int:
        piece = bytes(data)  # type: ignore[call-overload]
        self.pieces.append(piece.decode())
        return super().write(piece)


class Terminal(io.TextIOWrapper):
    """A stdout that says it is a terminal."""

    def __init__(self, received: Received) -> None:
        super().__init__(received, "utf-8", write_through=True)

    def isatty(self) -> bool:
        return True


@pytest.fixture
def generate(umim: Umim, tiny_checkpoint: Path) -> Umim:
    """Run the command on the prompt with some options."""
    return partial(umim, "generate", PROMPT, "-c", tiny_checkpoint, "--max-new-tokens", "9")


def test_a_stream_prints_the_text_of_a_whole_run(generate: Umim, tiny_umim: UMIM) -> None:
    expected = tiny_umim.generate(PROMPT, max_new_tokens=9).text[0]
    assert generate("--stream").out == generate("--no-stream").out == expected + "\n"


@pytest.mark.parametrize(("options", "streams"), [([], True), (["--no-stream"], False)])
def test_a_terminal_gets_pieces_unless_it_refuses_them(
    generate: Umim,
    tiny_umim: UMIM,
    monkeypatch: pytest.MonkeyPatch,
    options: Sequence[str],
    streams: bool,
) -> None:
    received = Received()
    monkeypatch.setattr(sys, "stdout", Terminal(received))
    assert generate(*options).code == 0
    text = tiny_umim.generate(PROMPT, max_new_tokens=9).text[0]
    assert "".join(received.pieces) == text + "\n"
    words = [piece for piece in received.pieces if piece.strip()]
    assert (len(words) > 1) == streams


def test_the_document_is_that_of_the_library(generate: Umim, tiny_umim: UMIM) -> None:
    options = {"raw_tail": 4, "decode_max_damage": math.inf, "logprobs": 2}
    out = tiny_umim.generate(PROMPT, max_new_tokens=9, **options)
    flags = ("--raw-tail", 4, "--decode-max-damage", "inf", "--logprobs", 2, "--json")
    flags += ("--dtype", "float32")
    found = json.loads(generate(*flags).out)
    assert set(found.pop("timings")) == {"first_token", "decode"}
    assert found == json.loads(
        json.dumps(
            {
                "text": out.text[0],
                "ids": out.ids[0],
                "prompt_spans": [[0, 2], [3, 3]],  # w6 w7 w8 w9 reaches into the last four
                "generated_spans": out.generated_spans[0],
                "token_reduction": out.token_reduction[0],
                "gen_kv_reduction": out.gen_kv_reduction[0],
                "cumulative_kv_reduction": out.cumulative_kv_reduction[0],
                "cache_lengths": out.cache_lengths[0],
                "stop_reason": out.stop_reasons[0],
                "logprobs": out.logprobs[0],
                "top_logprobs": out.top_logprobs[0],
                "merge": "all",
                "raw_tail": 4,
                "span_eviction": None,
                "unmerged": "",
            }
        )
    )


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
    tiny_model: Callable[[str, int], PreTrainedModel],
    tiny_tokenizer: PreTrainedTokenizerFast,
    tiny_umim: UMIM,
) -> Path:
    """A checkpoint whose backbone has a chat template and samples by its own settings."""
    folder = tmp_path_factory.mktemp("chatty")
    model = tiny_model("llama", 0)
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
