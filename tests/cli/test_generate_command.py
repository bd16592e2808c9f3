"""``umim generate`` in this process: streaming, samples, colours, pages and refusals."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from support.command_line import Umim
from umim_core import UMIM

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


def test_samples_are_those_of_the_library(generate: Umim, tiny_umim: UMIM) -> None:
    expected = tiny_umim.generate(PROMPT, max_new_tokens=9, do_sample=True, n=3, seed=5)
    found = json.loads(generate("--sample", "-n", 3, "--seed", 5, "--json").out)["samples"]
    assert [sample["ids"] for sample in found] == [list(ids) for ids in expected.ids]
    assert len({str(sample["ids"]) for sample in found}) > 1


def test_the_document_names_figures_and_times(generate: Umim, tiny_umim: UMIM) -> None:
    expected = tiny_umim.generate(PROMPT, max_new_tokens=9)
    found = json.loads(generate("--json").out)
    assert found["cumulative_kv_reduction"] == expected.cumulative_kv_reduction[0]
    assert found["stop_reason"] == expected.stop_reasons[0]
    assert set(found["timings"]) == {"first_token", "decode"} and "logprobs" not in found


def test_a_raw_tail_and_a_bound_on_damage_are_those_of_the_library(
    generate: Umim, tiny_umim: UMIM
) -> None:
    options = {"raw_tail": 4, "decode_max_damage": math.inf}
    expected = tiny_umim.generate(PROMPT, max_new_tokens=9, **options)
    flags = ["--raw-tail", 4, "--decode-max-damage", "inf"]
    found = json.loads(generate(*flags, "--json").out)
    assert (found["merge"], found["raw_tail"], found["span_eviction"]) == ("all", 4, None)
    assert found["prompt_spans"] == [[0, 2], [3, 3]]  # w6 w7 w8 w9 reaches into the last four
    assert found["generated_spans"] == [list(span) for span in expected.generated_spans[0]]
    assert found["cache_lengths"] == list(expected.cache_lengths[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stream", "--sample", "-n", "2"], "--stream prints one text as it comes"),
        (["--show", "--json"], "--json prints one document and nothing else; got --show"),
        (
            ["--greedy", "-n", "2"],
            "greedy decoding gives one text and draws nothing; got --samples",
        ),
        (["--greedy", "--temperature", "0.5"], "got --temperature 0.5. Say --sample."),
        (["--top-k", "3"], "need do_sample; got ['top_k']"),
        (["--raw-tail", "-2"], "raw_tail must be an integer of at least 0; got -2"),
        (["--span-eviction", "16"], "reads prompt and generated tokens raw; got merge 'all'"),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    generate: Umim, options: list[str], message: str
) -> None:
    result = generate(*options)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("umim: error: ") and message in result.err
