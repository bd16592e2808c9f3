"""Windows of long documents: every token is scored once, with a least number of tokens before it.

A worked example, a document of 9 tokens, windows of 5, 2 tokens of context, no special token::

    a b c d e f g h i
    [a B C D E]            scored: capitals; a document's first token has nothing before it
          [d e F G H]      d e: context, scored in the window before
                [g h I]    the rest is not dropped

A window never crosses a document's border. With a BOS in front of every window, a is scored, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from umim_core.errors import ConfigError, require
from umim_core.text.token_ids import Ids, decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Window:
    ids: Ids  # special ones in front, context, then what is scored [up to the window's length]
    given: int  # leading ids that are not scored, at least 1
    document: int  # its number


def document_windows(
    pieces: Iterable[tuple[Ids, bool]], length: int, context: int = 0, lead: Sequence[int] = ()
) -> Iterator[Window]:
    room = length - len(lead)
    overlap = max(context, 0 if lead else 1)
    rule = f"context_tokens must lie between 0 and {room - 1} in a window of {length} tokens"
    fits = 0 <= context < room and overlap < room
    require(fits, ConfigError, rule, context, "Lower it, or use longer windows.")
    front = np.asarray(lead, dtype=np.int32)
    document, before, buffer = 0, 0, np.zeros(0, dtype=np.int32)
    for ids, last in pieces:
        buffer = np.concatenate([buffer, ids])
        while len(buffer) >= room:
            yield _window(front, buffer[:room], before, document)
            buffer, before = buffer[room - overlap :], overlap
        if last:
            if len(buffer) > max(before, 0 if lead else 1):
                yield _window(front, buffer, before, document)
            document, before, buffer = document + 1, 0, buffer[:0]


def _window(front: Ids, ids: Ids, before: int, document: int) -> Window:
    context = max(len(front) + before, 1)
    return Window(np.concatenate([front, ids]), context, document)


def second_halves(windows: Sequence[Window]) -> list[Window]:
    """Return windows whose second halves are scored, each a document of its own.

    Windows of a single token are left out, and those whose context reaches into the second half:
    the window before them scored it.
    """
    wide = [window for window in windows if window.given <= len(window.ids) // 2]
    return [Window(w.ids, len(w.ids) // 2, number) for number, w in enumerate(wide)]


def scored_bytes(
    windows: Sequence[Window], lead: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> int:
    """Return the bytes of the text (UTF-8, decoded) whose tokens are scored.

    A token's own bytes depend on its neighbours (characters that two tokens share, blanks that a
    text's first token loses), so texts are decoded from the document's beginning.
    """
    total = 0
    for _, group in groupby(windows, key=lambda window: window.document):
        parts = list(group)
        first = parts[0].ids[len(lead) :].tolist()
        ids = first + [i for part in parts[1:] for i in part.ids[part.given :].tolist()]
        skipped = parts[0].given - len(lead)
        total += _bytes(tokenizer, ids) - _bytes(tokenizer, ids[:skipped])
    return total


def _bytes(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> int:
    return len(decode(tokenizer, ids).encode("utf-8", "replace")) if ids else 0
