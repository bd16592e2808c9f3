"""Views of compressed and of generated text: colours, texts of units, figures and HTML."""

from __future__ import annotations

import io
import re
from itertools import accumulate, groupby
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from support.engine_matrix import finished_row
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import Timings
from umim_core.model.generation_output import GenerationOutput
from umim_core.model.showing import Decode, Piece, View, html_page, unit_texts

PLAIN = GenerateOptions(merge="all")
LETTERS = "abcdefghijklmnop"


def letters(ids: list[int]) -> str:
    return "".join(LETTERS[i] for i in ids)


def generated(decode: Decode = letters, options: GenerateOptions = PLAIN) -> View:
    row = finished_row((0, 1, 2, 3), (4, 5, 6, 7, 8), (3, 4, 5, 6, 5), [(1, 2)], [(1, 3)])
    backbone: Any = SimpleNamespace(decode=decode)
    state: Any = None
    (view,) = GenerationOutput((row,), Timings(0.0123, 1.0), state, options, backbone).views
    return view


def printed(view: View, **console: Any) -> str:
    file = io.StringIO()
    view.show(Console(file=file, width=200, **console))
    return file.getvalue()


def test_a_generation_is_its_prompt_and_its_text_in_units() -> None:
    prompt = [Piece("a", 1, True), Piece("bc", 2, True), Piece("d", 1, True)]
    text = [Piece("e", 1), Piece("fgh", 3), Piece("i", 1)]
    assert list(generated().pieces) == [*prompt, *text]


def test_the_terminal_shows_the_prompt_dim_and_spans_in_alternating_colours() -> None:
    shown = printed(generated(), force_terminal=True, color_system="standard")
    codes = {text: code for code, text in re.findall(r"\x1b\[([\d;]+)m(\w+)\x1b\[0m", shown)}
    assert codes["a"] == codes["d"] == "2"  # dim
    assert codes["bc"].endswith("46") and codes["fgh"].endswith("103")  # cyan, bright yellow
    assert "e" not in codes and "i" not in codes


def test_html_marks_spans_and_escapes_text_of_the_prompt_and_of_the_title() -> None:
    marks = re.findall(
        r'<mark style="([^"]*)" title="(\d) tokens">(\w+)</mark>', generated().html()
    )
    colours, *others = zip(*marks, strict=True)
    assert others == [("2", "3"), ("bc", "fgh")] and len(set(colours)) == 2
    fragment = generated(decode=lambda ids: "<b>&" * len(ids)).html()
    assert "<b>" not in fragment and fragment.count("&lt;b&gt;&amp;") == 9
    assert "<title>a &lt;b&gt;</title>" in html_page("a <b>", fragment)


def byte_level(ids: list[int]) -> str:
    """Like a byte-level BPE: bytes, and 256 that is left out, as special tokens are."""
    return bytes(i for i in ids if i < 256).decode(errors="replace")


def byte_fallback(ids: list[int]) -> str:
    """Like SentencePiece with bytes: runs of bytes that are no UTF-8 are shown byte by byte."""
    text = ""
    for is_word, run in groupby(ids, lambda i: i >= 256):
        tokens = list(run)
        if is_word:
            text += "".join(f" {LETTERS[i % 16]}" for i in tokens)
            continue
        try:
            text += bytes(tokens).decode()
        except UnicodeDecodeError:
            text += "\ufffd" * len(tokens)
    return text.removeprefix(" ")


@pytest.mark.parametrize("decode", [byte_level, byte_fallback])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_a_character_belongs_to_the_unit_that_completes_it(decode, size: int) -> None:
    text = "日本語の質問です。🙂 Привет, мир!"
    ids = list(text.encode())
    lengths = [len(ids[n : n + size]) for n in range(0, len(ids), size)]
    ends = list(accumulate(lengths))
    expected = [ids[:end] for end in ends]
    shown = [bytes(part).decode(errors="ignore") for part in expected]
    texts = unit_texts(ids, lengths, decode)
    assert ["".join(texts[: n + 1]) for n in range(len(texts))] == shown


def test_merged_spans_stand_in_brackets_where_there_are_no_colours() -> None:
    assert printed(generated()).splitlines()[0] == "a[bc]de[fgh]i"
