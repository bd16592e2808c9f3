"""Windows of documents: each token is scored once, with its context, and none crosses a border."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from umim_core.errors import CorpusError
from umim_core.evaluation.windows import Window, document_windows, scored_bytes, second_halves


def pieces(documents: list[list[int]], size: int = 3) -> Iterator[tuple[np.ndarray, bool]]:
    for ids in documents:
        parts = [ids[i : i + size] for i in range(0, len(ids), size)] or [[]]
        for part in parts:
            yield np.array(part, np.int32), part is parts[-1]


def cut(documents: list[list[int]], *options: object) -> list[Window]:
    return list(document_windows(pieces(documents), *options))


def half(window: Window) -> list[int]:
    ids: list[int] = window.ids[window.given :].tolist()
    return ids


def test_the_worked_example() -> None:
    found = cut([[*range(9)]], 5, 2)
    assert [(w.ids.tolist(), w.given) for w in found] == [
        ([0, 1, 2, 3, 4], 1),
        ([3, 4, 5, 6, 7], 2),
        ([6, 7, 8], 2),
    ]


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    length=st.integers(4, 12),
    context=st.integers(0, 2),
    lead=st.sampled_from([(), (99,)]),
)
def test_every_token_is_scored_once_after_its_context(
    lengths: list[int], length: int, context: int, lead: tuple[int, ...]
) -> None:
    documents = [[100 * d + i for i in range(n)] for d, n in enumerate(lengths, 1)]
    scored: list[int] = []
    for window in cut(documents, length, context, lead):
        ids = window.ids.tolist()
        assert ids[: len(lead)] == list(lead) and len(ids) <= length
        assert len({i // 100 for i in ids[len(lead) :]}) == 1
        new = ids[window.given :]
        scored += new
        before = window.given - len(lead)
        assert before >= min(context, new[0] % 100)
    first = 0 if lead else 1
    assert scored == [i for ids in documents for i in ids[first:]]
    halves = [i for w in second_halves(cut(documents, length, context, lead)) for i in half(w)]
    assert len(halves) == len(set(halves))


def test_windows_are_cut_while_a_document_is_read() -> None:
    def endless() -> Iterator[tuple[np.ndarray, bool]]:
        while True:
            yield np.arange(4, dtype=np.int32), False

    found = document_windows(endless(), 6, 1)
    assert [len(next(found).ids) for _ in range(5)] == [6] * 5


@pytest.mark.parametrize(("length", "context", "lead"), [(1, 0, ()), (8, 8, ()), (8, 7, (1,))])
def test_a_window_without_room_is_refused(length: int, context: int, lead: tuple[int, ...]) -> None:
    with pytest.raises(CorpusError, match="window"):
        cut([[1, 2, 3]], length, context, lead)


@pytest.mark.parametrize(("context", "lead"), [(0, ()), (2, ()), (1, (0,))])
def test_bytes_are_those_of_the_scored_text(
    word_tokenizer: Callable[[list[str]], PreTrainedTokenizerFast],
    context: int,
    lead: tuple[int, ...],
) -> None:
    words = ["on", "mañana", "to", "été"]
    tokenizer = word_tokenizer(words)
    known = tokenizer.convert_tokens_to_ids(words)
    documents = [[known[i % 4] for i in range(n)] for n in (9, 4)]
    windows = cut(documents, 5, context, [tokenizer.convert_tokens_to_ids("on")] if lead else [])
    texts = [" ".join(words[i % 4] for i in range(n)) for n in (9, 4)]
    expected = sum(len(text.encode()) - (0 if lead else len("on")) for text in texts)
    assert scored_bytes(windows, lead, tokenizer) == expected
