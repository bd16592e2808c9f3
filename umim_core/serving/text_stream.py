"""Text of a row as its tokens come, held back where a stop string might begin.

stop "END"         tokens  the  EN  D         pieces  "the", "", stop
                   tokens  the  EN  VY        pieces  "the", "", "ENVY"
stop "<end>user"   tokens  the  <end>  user   pieces  "the", "", stop
                   tokens  the  <end>  us !   pieces  "the", "", "", "us!"

Special tokens are never shown, but a stop string may hold them.
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
        added = tokenizer.get_added_tokens_decoder()
        self._special = {number: token.content for number, token in added.items() if token.special}
        self._tail: list[int] = []  # the tokens of the last text, and those not decoded yet
        self._decoded, self._before = 0, ""  # how many the former are, and their text
        self._held, self._shown = "", list[bool]()  # text, and which characters are shown
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token and return the text that is certain to be shown."""
        if (special := self._special.get(token)) is not None:
            return self._add(special, shown=False)
        self._tail.append(token)
        text = self._text(self._tail)
        return "" if text.endswith(_BROKEN) else self._add(self._behind(text))

    def finish(self) -> str:
        """Return what is left when the row has ended: held back text, and half a character."""
        shown = self._add(self._behind(self._text(self._tail)))
        return shown + self._take(len(self._held))

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

    def _add(self, text: str, shown: bool = True) -> str:
        if self.stopped:
            return ""
        self._held += text
        self._shown += [shown] * len(text)
        ends = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            self.stopped = True
            before = self._take(min(ends))
            self._held = ""
            return before
        keep = max((_begun(self._held, stop) for stop in self._stops), default=0)
        return self._take(len(self._held) - keep)

    def _take(self, length: int) -> str:
        """Let go of the first characters that are held; return those to be shown."""
        text = "".join(
            c for c, shown in zip(self._held[:length], self._shown, strict=False) if shown
        )
        self._held, self._shown = self._held[length:], self._shown[length:]
        return text


def _begun(text: str, stop: str) -> int:
    """Return how many characters at a text's end might begin a stop string."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
