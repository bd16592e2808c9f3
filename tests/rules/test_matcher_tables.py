"""The matcher's tables: round trip, sharing, size, and refusal of what is not theirs."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from umim_core.errors import ArtifactError
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.rules.trie import _hash, _home, holds, segment
from umim_core.store.artifacts import read_json, write_manifest
from umim_core.text.token_ids import MAX_TOKEN_ID, TOKEN_BITS

HEADER = 8
SPANS = [(1, 2), (1, 2, 3), (2, 2), (4, 5, 6, 7), (4, 5, 6, 8), (4, 5, 6, 8, 2, 2), (2,) * 16]
Words = NDArray[np.uint64]


def random_rules(count: int, seed: int = 0) -> RuleSet:
    rng = np.random.default_rng(seed)
    draws = (rng.integers(0, 5000, rng.integers(2, 5)) for _ in range(count))
    return RuleSet.from_spans(tuple(draw.tolist()) for draw in draws)


def sign(directory: Path) -> None:
    """Write a manifest that fits whatever the directory holds now."""
    body = dict(read_json(directory / "manifest.json"))
    for name in ("files", "digest", "seal", "kind", "schema"):
        body.pop(name)
    write_manifest(directory, kind="rules", schema=2, body=body)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    RuleSet.from_spans(SPANS).save(tmp_path / "rules")
    return tmp_path / "rules"


def change(directory: Path, edit: Callable[[Words], object]) -> None:
    """Edit the words of the tables and sign the directory again."""
    path = directory / "matcher" / "tables.npy"
    words = np.load(path, allow_pickle=False)
    edited = edit(words)
    np.save(path, words if edited is None else edited, allow_pickle=False)
    sign(directory)


def test_loaded_tables_are_a_read_only_map_of_the_file(saved: Path) -> None:
    tables = RuleSet.load(saved).tables
    for words in (tables.slots, tables.pairs):
        base: object = words
        while isinstance(base, np.ndarray):
            base = base.base
        assert isinstance(base, mmap.mmap)
        assert not words.flags.writeable
        assert words.flags.aligned


@pytest.mark.parametrize("count", [0, 1, 1000, 20_000])
def test_a_rule_of_four_tokens_takes_less_than_fifty_bytes(count: int, tmp_path: Path) -> None:
    rules = random_rules(count)
    rules.save(tmp_path / "rules")
    fixed = 128 + 8 * HEADER + 16  # of the array file, ours, and one word of each part
    assert (tmp_path / "rules" / "matcher" / "tables.npy").stat().st_size <= fixed + 41 * len(rules)


def test_a_directory_without_tables_loads_and_matches_alike(saved: Path) -> None:
    (saved / "matcher" / "tables.npy").unlink()
    (saved / "matcher").rmdir()
    sign(saved)
    ids = np.array([1, 2, 3, 4, 5, 6, 8, 2, 2])
    assert Matcher(RuleSet.load(saved)).segment(ids)[1].tolist() == [3, 6]


def _put(index: int, value: int) -> Callable[[Words], None]:
    def edit(words: Words) -> None:
        words[index] = value

    return edit


def _slots(words: Words) -> Words:
    return words[HEADER : HEADER + int(words[1])]


def _fill(words: Words) -> None:
    slots = _slots(words)
    slots[slots == 0] = 1 << 20  # neither a rule nor on the way to one


def _clear_one(words: Words) -> None:
    slots = _slots(words)
    slots[np.flatnonzero(slots & 1)[0]] = 0


def _add_a_rule(words: Words) -> None:
    slots = _slots(words)
    slots[np.flatnonzero(slots == 0)[0]] = 9 << 20 | 9 << 2 | 1


def _flip(bit: int) -> Callable[[Words], None]:
    def edit(words: Words) -> None:
        slots = _slots(words)
        slots[np.flatnonzero(slots)[0]] ^= np.uint64(bit)

    return edit


def _hide_a_pair(words: Words) -> None:
    words[-1] = 0


def _show_all_pairs(words: Words) -> None:
    words[-1] = (1 << 64) - 1


def _widen(words: Words) -> Words:
    """Put a thousand slots behind: every home moves."""
    size = int(words[1])
    words[1] += 1000
    return np.insert(words, HEADER + size, np.zeros(1000, np.uint64))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_put(0, 2), r"must have layout 1; got 2\. Use the version of umim that wrote it"),
        *(
            (edit, "made of the rules in its folder; got other rules")
            for edit in (
                _put(1, 0),
                _put(1, 1 << 63),
                _put(2, 7),
                _put(3, 1),
                _put(5, 0),
                _fill,
                _clear_one,
                _add_a_rule,
                _flip(1),  # a rule that none is, or the other way round
                _flip(2),  # goes on to none, or ends too early
                _flip(4),  # another token
                _hide_a_pair,
                _show_all_pairs,
                _widen,
                lambda words: words[: HEADER + int(words[1])],
            )
        ),
        (lambda words: words[:HEADER], "at least 10 unsigned 64-bit words"),
        (lambda words: words.reshape(1, -1), r"words; got uint64 \(1, "),
        (lambda words: words.astype(np.int64), r"words; got int64"),
        (lambda words: words.astype(">u8"), r"words; got >u8"),
        (lambda words: words.astype(np.float64), r"words; got float64"),
        (lambda words: np.array(7, np.uint64), r"words; got uint64 \(\)"),
    ],
)
def test_tables_that_are_none_are_refused(
    saved: Path, edit: Callable[[Words], object], message: str
) -> None:
    change(saved, edit)
    with pytest.raises(ArtifactError, match=message):
        RuleSet.load(saved)


def test_tables_that_make_every_search_long_are_refused_at_once() -> None:
    """Pairs whose searches begin in the first half, which is full of others, lie in the second."""
    half = 10_000
    slots = np.full(2 * half + 1, 1, dtype=np.uint64)
    keys = np.uint64(7 << TOKEN_BITS) | np.arange(3 * half, dtype=np.uint64)
    chosen = [key for key in keys if _home(np.uint64(_hash(key)), slots) < half][:half]
    slots[half:-1] = np.array(chosen) << 2 | 1
    slots[-1] = 0
    ids = np.array([(7, int(key) & MAX_TOKEN_ID) for key in chosen], np.int32)
    assert not holds(ids, slots, np.zeros(1, np.uint64))


@pytest.mark.parametrize("digest", ["kept", "forged"])
def test_tables_of_other_rules_are_refused(saved: Path, tmp_path: Path, digest: str) -> None:
    RuleSet.from_spans([*SPANS[1:], (1, 3)]).save(tmp_path / "other")
    words = np.load(tmp_path / "other" / "matcher" / "tables.npy", allow_pickle=False)

    def edit(own: Words) -> Words:
        if digest == "forged":
            words[4:8] = own[4:8]
        return words

    change(saved, edit)
    with pytest.raises(ArtifactError, match="made of the rules in its folder; got other rules"):
        RuleSet.load(saved)


def test_a_pickle_in_an_array_file_does_nothing(saved: Path) -> None:
    np.save(saved / "matcher" / "tables.npy", np.array([{}], dtype=object), allow_pickle=True)
    sign(saved)
    with pytest.raises(ArtifactError, match=r"must be an \.npy array"):
        RuleSet.load(saved)


@pytest.mark.parametrize("seed", range(8))
def test_a_table_that_lies_leads_nowhere_outside(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = rng.integers(0, 1 << 64, 64, dtype=np.uint64)
    slots[:48] &= np.uint64((1 << 45) - 1)
    slots[48:56] |= np.uint64(3)
    slots[rng.integers(64)] = 0
    pairs = np.full(2, (1 << 64) - 1, dtype=np.uint64)
    ids = rng.integers(0, 1 << 18, 5000).astype(np.int32)
    starts, lengths, borders = segment(ids, np.array([0, 17, 5000], dtype=np.int64), slots, pairs)
    assert 1 <= lengths.min() <= lengths.max() <= 16
    assert np.array_equal(starts, np.cumsum(lengths) - lengths)
    assert (lengths.sum(), borders[-1], starts[borders[1]]) == (5000, len(starts), 17)


TOKEN = st.integers(0, 3)


@given(spans=st.sets(st.lists(TOKEN, min_size=2, max_size=7).map(tuple), max_size=5))
def test_the_verdict_infix_free_is_that_of_all_pairs_of_rules(spans: set[tuple[int, ...]]) -> None:
    inside = any(
        short == long[start : start + len(short)]
        for short in spans
        for long in spans - {short}
        for start in range(len(long) - len(short) + 1)
    )
    assert RuleSet.from_spans(spans).infix_free is not inside
