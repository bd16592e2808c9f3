"""Oracles of n-gram counting, by ``collections.Counter``, and of matching, by a loop; corpora."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from umim_core.config.rule_options import RuleOptions
from umim_core.mining import counting
from umim_core.rules.grams import LONGEST, MAX_LONGEST, NgramCounts, orders_to
from umim_core.rules.ruleset import RuleOrigin, RuleSet

Gram = tuple[int, ...]
Grams = dict[Gram, int]
Segments = Sequence[Sequence[int]]


def oracle(
    segments: Segments, tau: int, excluded: frozenset[int] = frozenset(), longest: int = LONGEST
) -> Grams:
    """Count every gram of 2 to ``longest`` tokens by itself."""
    counter: Counter[Gram] = Counter()
    for segment in segments:
        for n in range(2, longest + 1):
            for start in range(len(segment) - n + 1):
                gram = tuple(segment[start : start + n])
                if not excluded & set(gram):
                    counter[gram] += 1
    return {gram: count for gram, count in counter.items() if count >= tau}


def document_oracle(
    segments: Segments, document_ends: Sequence[int], longest: int = LONGEST
) -> Grams:
    """Count the documents of every gram; it belongs to the document of its first token."""
    found: dict[Gram, set[int]] = {}
    position = 0
    for segment in segments:
        for start in range(len(segment)):
            document = next(d for d, end in enumerate(document_ends) if position + start < end)
            for n in orders_to(longest):
                if start + n <= len(segment):
                    found.setdefault(tuple(segment[start : start + n]), set()).add(document)
        position += len(segment)
    return {gram: len(documents) for gram, documents in found.items()}


def as_dict(counts: NgramCounts) -> Grams:
    return by_gram(counts, counts.support)


def by_gram(counts: NgramCounts, values: dict[int, np.ndarray]) -> Grams:
    return named({n: counts.ids(n) for n in counts.orders}, values)


def grams_of(rules: RuleSet) -> Grams:
    """Return the counts of a rule set by rule."""
    return named(rules.ids_by_order, rules.support_by_order)


def rules_of_counts(counts: Grams, origin: RuleOrigin | None = None) -> RuleSet:
    """Make the rules that have these counts."""
    orders = orders_to(max(map(len, counts), default=0))
    rows = {n: sorted(gram for gram in counts if len(gram) == n) for n in orders}
    return RuleSet(
        {n: np.array(rows[n], np.int32).reshape(-1, n) for n in orders},
        {n: np.array([counts[gram] for gram in rows[n]], np.int64) for n in orders},
        origin or RuleOrigin(),
    )


def named(ids: dict[int, np.ndarray], values: dict[int, np.ndarray]) -> Grams:
    """Return values [R_n] of grams [R_n, n] per order by gram."""
    return {
        tuple(gram): int(value)
        for n in ids
        for gram, value in zip(ids[n].tolist(), values[n], strict=True)
    }


def cut(stream: np.ndarray, length: int) -> list[list[int]]:
    """Cut a stream into segments; the remainder is dropped."""
    starts = range(0, len(stream) - length + 1, length)
    return [stream[start : start + length].tolist() for start in starts]


@contextmanager
def chunks_of(tokens: int) -> Iterator[None]:
    """Let what counts read so many tokens at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "CHUNK_TOKENS", tokens)
        yield


def filtered(counts: NgramCounts, **options: object) -> RuleSet:
    """Make rules of all that was counted, or as the options say."""
    asked = {"tau": counts.tau, "segment_length": None, **options}
    return RuleSet.from_counts(counts, RuleOrigin(options=RuleOptions.model_validate(asked)))


def read_spans(rules: Path) -> set[Gram]:
    return {tuple(ids) for ids in pq.read_table(rules / "rules.parquet")["ids"].to_pylist()}


def units_of(ids: Sequence[int], spans: Container[Gram]) -> list[tuple[int, int]]:
    """Units (start, tokens) of a text: left to right, the longest rule first, else one token."""
    units, place = [], 0
    while place < len(ids):
        most = min(MAX_LONGEST, len(ids) - place)
        fitting = [n for n in range(2, most + 1) if tuple(ids[place : place + n]) in spans]
        units.append((place, max(fitting, default=1)))
        place += units[-1][1]
    return units
