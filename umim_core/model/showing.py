"""Display of units: merged spans coloured in the terminal and as HTML.

A view is a row of pieces, one a unit, and a line of figures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Final

from rich.console import Console
from rich.text import Text

from umim_core.text.text_stream import TextStream

Decode = Callable[[list[int]], str]

# Neighbouring merged spans alternate, so that their border shows.
_COLOURS: Final = ("#9be7f2", "#ffe28a")
_STYLES: Final = ("black on bright_cyan", "black on bright_yellow")
_PROMPT_STYLES: Final = ("black on cyan", "black on yellow")


@dataclass(frozen=True)
class Piece:
    """A text in one colour.

    Attributes:
        text: What is shown; a character of several tokens belongs to the unit that completes it.
        tokens: Raw tokens of its unit; more than 1 where a span was merged.
        prompt: Whether it is part of the prompt of a generated text.
    """

    text: str
    tokens: int
    prompt: bool = False


@dataclass(frozen=True)
class View:
    """Pieces in order and a line of figures; ``name`` is the class of the HTML fragment."""

    pieces: tuple[Piece, ...]
    summary: str
    name: str

    def show(self, console: Console | None = None) -> None:
        """Print the text with merged spans coloured and the prompt dim, then the figures.

        Where there are no colours, as in a pipe, merged spans stand in square brackets.
        """
        out = console or Console()
        plain = out.color_system is None or out.no_color
        text = Text()
        for piece, merged in self._numbered():
            # What the terminal cannot write is shown as escapes.
            shown = piece.text.encode(out.encoding, "backslashreplace").decode(out.encoding)
            if plain:
                text.append(f"[{shown}]" if piece.tokens > 1 else shown)
                continue
            if piece.tokens > 1:
                style = (_PROMPT_STYLES if piece.prompt else _STYLES)[merged % 2]
            else:
                style = "dim" if piece.prompt else ""
            text.append(shown, style=style)
        out.print(text)
        out.print(self.summary, style="dim", highlight=False)

    def html(self) -> str:
        """Return a self-contained HTML fragment with merged spans as coloured ``<mark>`` elements.

        All text is escaped; nothing is loaded from elsewhere.
        """
        parts = []
        for piece, merged in self._numbered():
            text, faint = escape(piece.text), "opacity:0.6" if piece.prompt else ""
            if piece.tokens > 1:
                style = ";".join(filter(None, (f"background:{_COLOURS[merged % 2]}", faint)))
                text = f'<mark style="{style}" title="{piece.tokens} tokens">{text}</mark>'
            elif faint:
                text = f'<span style="{faint}">{text}</span>'
            parts.append(text)
        return (
            f'<div class="{self.name}"><pre style="white-space:pre-wrap">'
            + "".join(parts)
            + f"</pre><p>{escape(self.summary)}</p></div>"
        )

    def _numbered(self) -> list[tuple[Piece, int]]:
        """Return every piece with how many merged ones stand before it."""
        merged = accumulate((piece.tokens > 1 for piece in self.pieces), initial=0)
        return list(zip(self.pieces, merged, strict=False))


class Shown(ABC):
    """What has views: of a text, or of each row of several."""

    @property
    @abstractmethod
    def views(self) -> tuple[View, ...]: ...

    def show(self, console: Console | None = None) -> None:
        for view in self.views:
            view.show(console)

    def html(self) -> str:
        return "".join(view.html() for view in self.views)

    def _repr_html_(self) -> str:  # of notebooks
        return self.html()


def merged_pieces(
    ids: Sequence[int], spans: Iterable[tuple[int, int]], decode: Decode, prompt: int = 0
) -> tuple[Piece, ...]:
    """Return the units of raw ids [T] as pieces.

    ``spans`` are merged, as (start, length); the first ``prompt`` ids are those of a prompt.
    """
    merged, starts, at = dict(spans), list[int](), 0
    while at < len(ids):
        starts.append(at)
        at += merged.get(at, 1)
    lengths = [merged.get(start, 1) for start in starts]
    units = zip(unit_texts(ids, lengths, decode), lengths, starts, strict=True)
    return tuple(Piece(text, length, start < prompt) for text, length, start in units)


def unit_texts(ids: Sequence[int], lengths: Sequence[int], decode: Decode) -> tuple[str, ...]:
    """Return the text of every unit of raw ids [T]; together they are the text of the ids.

    Not so where a decoder writes characters anew because bytes behind them are none. A character of
    several tokens belongs to the unit that completes it::

        ids     E3 81 | 93 E3 82 | 93            bytes of two Japanese letters in three units
        texts   ""      "\u3053"    "\u3093"
    """
    stream, texts, at = TextStream(decode), list[str](), 0
    for length in lengths:
        texts.append("".join(map(stream.push, ids[at : at + length])))
        at += length
    if texts:
        texts[-1] += stream.finish()
    return tuple(texts)


def html_page(title: str, fragment: str) -> str:
    head = f'<!doctype html><meta charset="utf-8"><title>{escape(title)}</title>'
    return head + fragment
