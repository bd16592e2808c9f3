"""Text of tokens as they come: all of it, and none behind a text that ends it."""

from __future__ import annotations

import time
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.text.text_stream import TextStream


@pytest.fixture(scope="module")
def core() -> Tokenizer:
    return load_tokenizer("umim-docs-llama").backend_tokenizer


def stream_of(core: Tokenizer, stops: tuple[str, ...]) -> TextStream:
    added = core.get_added_tokens_decoder().items()
    special = {number: token.content for number, token in added if token.special}
    return TextStream(partial(core.decode, skip_special_tokens=True), special, stops)


def run(core: Tokenizer, ids: list[int], stops: tuple[str, ...] = ()) -> tuple[str, bool]:
    stream = stream_of(core, stops)
    text = ""
    for token in ids:
        text += stream.push(token)
        if stream.stopped:
            break
    return text + stream.finish(), stream.stopped


@given(ids=st.lists(st.integers(0, 8191), max_size=30))
def test_any_ids_give_their_text(core: Tokenizer, ids: list[int]) -> None:
    assert run(core, ids) == (core.decode(ids, skip_special_tokens=True), False)


@pytest.mark.parametrize(
    ("stop", "shown", "stopped"),
    [
        ("<|im_start|>", "the ", True),
        ("<|im_start|>user", "the ", True),
        ("<|im_start|>use", "the ", True),
        ("e <|im_start|>u", "th", True),
        ("r<own>", "the use", True),
        ("<own>", "the user", True),
        ("<|endoftext|>", "the user<own>", True),
        ("<|im_start|>system", "the user<own>", False),
        ("the <|endoftext|>", "the user<own>", False),
    ],
)
def test_stops_may_hold_special_tokens(
    core: Tokenizer, stop: str, shown: str, stopped: bool
) -> None:
    wide = Tokenizer.from_str(core.to_str())
    wide.add_special_tokens(["<|im_start|>"])
    wide.add_tokens(["<own>"])  # shown, as it is not special
    ids = wide.encode("the <|im_start|>user<own><|endoftext|>", add_special_tokens=False).ids
    assert run(wide, ids, (stop, "never")) == (shown, stopped)


@pytest.fixture(scope="module")
def bytes_core() -> Tokenizer:
    """A token for each byte, as of byte fallback, and then 256: "x", 257: " y"."""
    words = [*(f"<0x{n:02X}>" for n in range(256)), "x", "\u2581y"]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return core


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([257, 256, 257], "yx y"),
        ([*"é€🙂".encode(), 256], "é€🙂x"),
        ([0xE2, 256], "\ufffdx"),
        ([0x41, 0xFF, 0xFE, 256], "A\ufffd\ufffdx"),
        ([*"é".encode(), 0xFF, 257, 0x42], "é\ufffd yB"),
        ([256, 0xE2, 0x82], "x\ufffd\ufffd"),
    ],
)
def test_bytes_that_are_no_text_end_nothing(
    bytes_core: Tokenizer, ids: list[int], text: str
) -> None:
    assert run(bytes_core, ids) == (text, False)


def test_what_might_begin_a_stop_is_held_back_and_then_shown(core: Tokenizer) -> None:
    ids = core.encode("the array", add_special_tokens=False).ids
    stream = stream_of(core, ("array of",))
    pushed = [stream.push(token) for token in ids]
    assert "".join(pushed) == "the "
    assert stream.finish() == "array"
    assert not stream.stopped


def test_a_long_text_of_bytes_that_are_no_text_takes_no_time() -> None:
    ids = [0xE3, 0x81, 0xFF, 0x80] * 5000
    stream = TextStream(lambda part: bytes(part).decode(errors="replace"))
    began = time.process_time()
    assert "".join(map(stream.push, ids)) + stream.finish() == bytes(ids).decode(errors="replace")
    assert time.process_time() - began < 3


RUNS = st.one_of(
    st.binary(max_size=3),
    st.text(max_size=3).map(str.encode),
    st.builds(bytes.__mul__, st.sampled_from([b"\xff", b"\x80", b"\xe3"]), st.integers(10, 40)),
)


@given(st.lists(RUNS, max_size=8).map(b"".join))
@example(b"\xff" * 15 + "こ".encode())
@example(b"\x80" * 15 + "éA".encode())
@example(b"\xff" * 12 + "こ".encode() + b"\xff" * 2 + "🙂".encode())
def test_characters_behind_any_run_of_broken_bytes_are_shown(data: bytes) -> None:
    stream = TextStream(lambda part: bytes(part).decode(errors="replace"))
    assert "".join(map(stream.push, data)) + stream.finish() == data.decode(errors="replace")
