"""Text of a row as its tokens come, held back where a stop string might begin.

stop "END"    tokens  the  EN  D      pieces  "the", "", stop
              tokens  the  EN  VY     pieces  "the", "", "ENVY"
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """Decodes one row.

    Args:
        tokenizer: The tokenizer's compiled part.
        stops: Texts that end the row; what is shown ends before them.

    Attributes:
        stopped: Whether one has come.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._seen = 0  # characters decoded
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token and return the text that is certain to be shown."""
        self._ids.append(token)
        return self._add(self._decoder.step(self._tokenizer, token) or "")

    def finish(self) -> str:
        """Return what is left when the row has ended: held back text, and half a character."""
        if self.stopped:
            return ""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        shown = self._add(whole[self._seen :]) + self._held
        self._held = ""
        return shown

    def _add(self, text: str) -> str:
        self._seen += len(text)
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
