"""Candidate mode: what a sample may miss, and that everything it reports is exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import poisson

from support.ngram_oracle import as_dict, by_gram, document_oracle, flat, oracle
from umim_core.mining.candidates import (
    GROUP_SEGMENTS,
    SAMPLE_TAU,
    CandidateReport,
    choose_candidates,
    miss_probability,
    sample_segments,
)
from umim_core.mining.counting import count_ngrams
from umim_core.mining.finding import LocalCounter, find_ngrams
from umim_core.mining.mining_options import SearchOptions
from umim_core.rules.grams import ORDERS, NgramCounts
from umim_core.text.token_ids import UniformOffsets


def find(
    ids: np.ndarray,
    offsets: np.ndarray | UniformOffsets,
    options: SearchOptions,
    document_ends: np.ndarray | None = None,
    excluded: tuple[int, ...] = (),
) -> tuple[NgramCounts, CandidateReport]:
    counter = LocalCounter(ids, offsets, excluded, threads=2)
    counts, report = find_ngrams(ids, offsets, options, counter, document_ends)
    assert report is not None
    return counts, report


def zipf(tokens: int, words: int = 300, seed: int = 5) -> np.ndarray:
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, words + 1)
    return rng.choice(words, tokens, p=weights / weights.sum()).astype(np.int32)


def numbered(sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """A corpus in which each token is the number of its segment."""
    return flat([[number] * size for number, size in enumerate(sizes)])


@settings(max_examples=60)
@given(
    count=st.integers(0, 400), tokens=st.integers(1, 900), seed=st.integers(0, 99), data=st.data()
)
def test_a_sample_is_made_of_whole_segments_in_groups(
    count: int, tokens: int, seed: int, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    ids, offsets = numbered(sizes)
    sample, borders = sample_segments(ids, offsets, tokens, seed)
    assert (sample.dtype, borders.dtype) == (np.int32, np.int64)
    assert (borders[0], borders[-1]) == (0, sample.size)
    found = {int(number): int((sample == number).sum()) for number in np.unique(sample)}
    assert found == {number: sizes[number] for number in found}, "each segment once and whole"
    assert sample.tolist() == sorted(sample.tolist()), "in the order of the corpus"
    groups = sorted({number // GROUP_SEGMENTS for number in found})
    chosen = [n for g in groups for n in range(g * GROUP_SEGMENTS, (g + 1) * GROUP_SEGMENTS)]
    assert set(found) == {n for n in chosen if n < count and sizes[n]}, "groups are whole"


def test_a_corpus_no_larger_than_the_sample_is_taken_whole() -> None:
    ids, offsets = numbered([3] * 200)
    for tokens in (599, 600, 10_000):
        sample, borders = sample_segments(ids, offsets, tokens, 0)
        assert sample.tolist() == ids.tolist()
        assert borders.tolist() == offsets.tolist()


@pytest.mark.parametrize("tau", [2, 3, 7])
@pytest.mark.parametrize("length", [2, 3, 4, 30])
def test_with_the_whole_corpus_as_sample_the_result_is_exact(tau: int, length: int) -> None:
    ids = zipf(3001)
    offsets = UniformOffsets(length, len(ids) // length)
    options = SearchOptions(tau, sample_tokens=offsets[-1] - 1)
    counts, report = find(ids, offsets, options)
    assert report.fraction == 1.0
    want = count_ngrams(ids, offsets, tau)
    for n in ORDERS:
        assert counts.keys[n].tolist() == want.keys[n].tolist()
        assert counts.support[n].tolist() == want.support[n].tolist()


@pytest.mark.parametrize("seed", range(4))
def test_every_count_from_a_sample_is_exact(seed: int) -> None:
    ids = zipf(20_000)
    offsets = UniformOffsets(4, 5000)
    segments = ids.reshape(-1, 4).tolist()
    excluded = frozenset({3, 8})
    ends = np.array([7, 3000, 3000, 12_345, 20_000])
    options = SearchOptions(20, count_documents=True, sample_tokens=3000, seed=seed)
    counts, report = find(ids, offsets, options, ends, tuple(excluded))
    want = oracle(segments, 20, excluded)
    found = as_dict(counts)
    assert 0 < len(found) <= len(want)
    assert found == {gram: want[gram] for gram in found}
    assert counts.documents is not None
    documents = document_oracle(segments, ends.tolist())
    assert by_gram(counts, counts.documents) == {gram: documents[gram] for gram in found}
    assert report.fraction == pytest.approx(0.15, abs=0.03)
    assert report.candidates >= len(found)
    # What was missed is rare, at least as rare as told for the threshold.
    most = sum(miss_probability(c, report.fraction, SAMPLE_TAU) for c in want.values())
    assert len(want) - len(found) <= most + 4 * most**0.5 + 1


@pytest.mark.parametrize("limit", [1, 5, 40, 41, 10**6])
def test_at_most_so_many_candidates_are_chosen(limit: int) -> None:
    counts = count_ngrams(zipf(2000, 20), np.array([0, 2000]), 2)
    chosen = choose_candidates(counts, limit)
    grams = as_dict(counts)
    fits = [tau for tau in range(2, 2001) if sum(c >= tau for c in grams.values()) <= limit]
    assert as_dict(chosen) == {gram: c for gram, c in grams.items() if c >= fits[0]}
    assert len(chosen) <= limit
    assert chosen.tau == (2 if limit == 10**6 else fits[0])


@given(
    tau=st.integers(1, 10_000),
    fraction=st.floats(1e-6, 1.0),
    sample_tau=st.integers(1, 60),
)
def test_the_probability_of_a_miss_is_poisson(tau: int, fraction: float, sample_tau: int) -> None:
    got = miss_probability(tau, fraction, sample_tau)
    want = float(poisson.cdf(sample_tau - 1, fraction * tau))
    assert got == pytest.approx(want, rel=1e-8, abs=1e-290)
    assert 0.0 <= got <= 1.0
