"""Text of a row as its tokens come, held back where a stop string might begin.

stop "END"    tokens  the  EN  D      pieces  "the", "", stop
              tokens  the  EN  VY     pieces  "the", "", "ENVY"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer

_BROKEN: Final = "\ufffd"  # what bytes decode to that are no character, or not yet


class TextStream:
    """Decodes one row until a text that ends it; what is shown ends before that text.

    Attributes:
        stopped: Whether one has come.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._tail: list[int] = []  # the tokens of the last text, and those not decoded yet
        self._decoded, self._before = 0, ""  # how many the former are, and their text
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token and return the text that is certain to be shown."""
        self._tail.append(token)
        text = self._text(self._tail)
        return "" if text.endswith(_BROKEN) else self._add(self._behind(text))

    def finish(self) -> str:
        """Return what is left when the row has ended: held back text, and half a character."""
        if self.stopped:
            return ""
        shown = self._add(self._behind(self._text(self._tail))) + self._held
        self._held = ""
        return shown

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _behind(self, text: str) -> str:
        """Return what the tail's text adds to what was decoded before."""
        fresh = self._tail[self._decoded :]
        # One wrong byte can turn a whole run of bytes, decoded before, into replacements.
        rewritten = not text.startswith(self._before)
        added = self._text(fresh) if rewritten else text[len(self._before) :]
        if added:
            self._tail, self._decoded, self._before = fresh, len(fresh), self._text(fresh)
        return added

    def _add(self, text: str) -> str:
        if self.stopped:
            return ""
        held = self._held + text
        ends = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return held[: min(ends)]
        keep = max((_begun(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


def _begun(text: str, stop: str) -> int:
    """Return how many characters at a text's end might begin a stop string."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
