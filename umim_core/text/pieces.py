"""Cut long documents where the tokenizer cuts them anyway, so that they need not fit in memory.

A candidate is a place where pre-tokenizers in use split, and each one is tried: the 400 characters
around it must give the same ids in one part and in two. A tokenizer that treats the start of a text
specially fails that at every place, and then a document stays whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from umim_core.errors import CorpusError
from umim_core.text.plain import Part

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE_CHARS: Final = 1 << 17
MAX_PIECE_CHARS: Final = 1 << 26
_WINDOW_CHARS: Final = 200
_BORDERS_TRIED: Final = 16
_LETTER: Final = r"[^\W\d_]"
# Runs of spaces and line ends are avoided: how they split depends on their whole length.
_BORDERS: Final = (
    re.compile(rf"(?<={_LETTER})(?= {_LETTER})"),  # letter | space letter
    re.compile(r"(?:(?<=\S\n)|(?<=\S\r\n))(?=\S)"),  # line end | next line
    re.compile(r"(?<=\S)(?=\r?\n\S)"),  # line | line end
    re.compile(r"(?<=[^\W_])(?= [^\W_])"),  # the same as the first with digits
    re.compile(rf"(?<={_LETTER}[。．！？；，、])(?={_LETTER})"),  # after a full-width stop
    re.compile(rf"(?<={_LETTER})(?=[。．！？；，、]{_LETTER})"),  # before it
)


def cut_pieces(
    parts: Iterable[Part],
    tokenizer: PreTrainedTokenizerBase,
    piece_chars: int = PIECE_CHARS,
    max_piece_chars: int = MAX_PIECE_CHARS,
) -> Iterator[Part]:
    """Cut documents into pieces whose ids, one after the other, are those of the whole.

    Yields:
        (piece, whether it ends its document).

    Raises:
        CorpusError: If a document has no usable border within `max_piece_chars`.
    """
    text, start, searched = "", 0, piece_chars  # searched: from `start`, without a border
    for part, last in parts:
        text, start = text[start:] + part, 0
        margin = piece_chars + (0 if last else _WINDOW_CHARS)
        while len(text) - start > searched + margin:
            if searched > max_piece_chars:
                raise CorpusError(
                    f"a document must have a place to cut it every {max_piece_chars} characters",
                    f"none in {text[start : start + 40]!r}...",
                    "Break its lines, split it into several documents or leave it out.",
                )
            begin = start + searched
            border = _border(text, tokenizer, begin, begin + piece_chars)
            if border is None:
                searched += piece_chars
                continue
            yield text[start:border], False
            start, searched = border, piece_chars
        if last:
            yield text[start:], True
            text, start, searched = "", 0, piece_chars


def _border(text: str, tokenizer: PreTrainedTokenizerBase, begin: int, end: int) -> int | None:
    """Return a position in [begin, end) at which the text can be cut, or None."""
    for shape in _BORDERS:
        for _, match in zip(range(_BORDERS_TRIED), shape.finditer(text, begin, end), strict=False):
            at = match.start()
            left, right = text[max(0, at - _WINDOW_CHARS) : at], text[at : at + _WINDOW_CHARS]
            whole, *parts = tokenizer(
                [left + right, left, right], add_special_tokens=False, verbose=False
            )["input_ids"]
            if list(whole) == [*parts[0], *parts[1]]:
                return at
    return None
