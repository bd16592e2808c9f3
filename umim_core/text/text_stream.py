"""Text of tokens as they come: of an answer that is generated, of a text unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

_BROKEN: Final = "\ufffd"  # what bytes decode to that are no character, or not yet
_MOST_BROKEN: Final = 16  # tokens that are read together, in case their bytes become characters
_OPEN: Final = 3  # of these, the last that the next may complete: a character has up to four bytes


class TextStream:
    """Decodes one row until a text that ends it; what is shown ends before that text.

    Text is held back where a stop string might begin. Special tokens are not shown, but for marks
    of calls, and a stop string may hold those that are named::

        stop "END"         tokens  the  EN  VY        pieces  "the", "", "ENVY"
        stop "<end>user"   tokens  the  <end>  user   pieces  "the", "", stop

    ``decode`` gives the text of ids without special tokens, ``special`` the texts of those that
    marks and stop strings may hold; ``stopped`` says whether a stop has come.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        special: Mapping[int, str] | None = None,
        stops: Sequence[str] = (),
        marks: Collection[str] = (),
    ) -> None:
        self._decode, self._special = decode, special or {}
        self._stops, self._marks = tuple(stops), marks
        self._tail: list[int] = []  # the tokens of the last text, and those not decoded yet
        self._decoded, self._before = 0, ""  # how many the former are, and their text
        self._held, self._shown = "", list[bool]()  # text, and which characters are shown
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token and return the text that is certain to be shown."""
        if (special := self._special.get(token)) is not None:
            return self._add(special, shown=special in self._marks)
        self._tail.append(token)
        text, waiting = self._decode(self._tail), len(self._tail) - self._decoded
        if not text.endswith(_BROKEN):
            return self._add(self._behind(text))
        if waiting < _MOST_BROKEN:
            return ""
        return self._add(self._behind(*self._before_a_character(text)))

    def finish(self) -> str:
        """Return what is left when the row has ended: held back text, and half a character."""
        shown = self._add(self._behind(self._decode(self._tail)))
        return shown + self._take(len(self._held))

    def _before_a_character(self, text: str) -> tuple[str, int | None]:
        """Return the tail's text before the last bytes, and its tokens.

        A character has up to four bytes: the last three tokens may begin one, and those before may
        end in one that only they complete. None: everything, where no cut gives the same text.
        """
        for end in range(len(self._tail) - _OPEN, self._decoded, -1):
            before = self._decode(self._tail[:end])
            if before + self._decode(self._tail[end:]) == text:
                return before, end
        return text, None

    def _behind(self, text: str, end: int | None = None) -> str:
        """Return what the text of the tail, or its beginning, adds to what was decoded before."""
        fresh = self._tail[self._decoded : end]
        # One wrong byte can turn a whole run of bytes, decoded before, into replacements.
        rewritten = not text.startswith(self._before)
        added = self._decode(fresh) if rewritten else text[len(self._before) :]
        if added:
            self._tail = self._tail[self._decoded :]
            self._decoded, self._before = len(fresh), self._decode(fresh)
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
        keep = max((begun(self._held, stop) for stop in self._stops), default=0)
        return self._take(len(self._held) - keep)

    def _take(self, length: int) -> str:
        """Let go of the first characters that are held; return those to be shown."""
        text = "".join(
            c for c, shown in zip(self._held[:length], self._shown, strict=False) if shown
        )
        self._held, self._shown = self._held[length:], self._shown[length:]
        return text


def begun(text: str, mark: str) -> int:
    """Return how many characters at a text's end might begin a mark."""
    most = min(len(text), len(mark) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(mark[:n])), 0)
