"""Views of compressed and of generated text: colours, texts of units, figures and HTML."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from itertools import accumulate, groupby
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from support.engine_matrix import finished_row
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import Timings
from umim_core.model.generation_output import GenerationOutput
from umim_core.model.showing import Decode, View, html_page, unit_texts

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


def cells(view: View) -> list[tuple[str, int, bool]]:
    return [(piece.text, piece.tokens, piece.prompt) for piece in view.pieces]


class Marks(HTMLParser):
    """The text and the marked spans of a fragment, by a parser that is not ours."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.text, self.marks, self._inside = "", [], False
        self.feed(fragment)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag == "mark"
        if self._inside:
            self.marks.append(["", dict(attrs)["style"]])

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._inside:
            self.marks[-1][0] += data


def printed(view: View) -> str:
    file = io.StringIO()
    view.show(Console(file=file, force_terminal=True, color_system="standard", width=200))
    return file.getvalue()


def test_a_generation_is_its_prompt_and_its_text_in_units() -> None:
    assert cells(generated()) == [
        ("a", 1, True),
        ("bc", 2, True),
        ("d", 1, True),
        ("e", 1, False),
        ("fgh", 3, False),
        ("i", 1, False),
    ]


def test_the_terminal_shows_the_prompt_dim_and_spans_in_alternating_colours() -> None:
    codes = dict(
        (text, code)
        for code, text in re.findall(r"\x1b\[([\d;]+)m(\w+)\x1b\[0m", printed(generated()))
    )
    assert codes["a"] == codes["d"] == "2"  # dim
    assert codes["bc"].endswith("46") and codes["fgh"].endswith("103")  # cyan, bright yellow
    assert "e" not in codes and "i" not in codes


def test_html_escapes_text_of_the_prompt_and_of_the_title() -> None:
    fragment = generated(decode=lambda ids: "<b>&" * len(ids)).html()
    assert "<b>" not in fragment and Marks(fragment).text.startswith("<b>&" * 9)
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
    file = io.StringIO()
    generated().show(Console(file=file, width=200))
    assert file.getvalue().splitlines()[0] == "a[bc]de[fgh]i"
