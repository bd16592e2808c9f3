"""Predicted costs against what counting a corpus four times as large really takes."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from support.ngram_oracle import chunks_of
from umim_core.errors import ResourceLimitError, RuleSetError
from umim_core.mining import mining_prediction as prediction
from umim_core.mining.candidates import SAMPLE_TAU
from umim_core.mining.costs import Limits, Prediction
from umim_core.mining.counting import OrderCounter, count_ngrams, excluded_mask
from umim_core.mining.finding import LocalCounter, SearchOptions, find_ngrams
from umim_core.mining.growth import GrowthLaw
from umim_core.mining.hashing import rank_indexes
from umim_core.mining.mining_prediction import (
    BLOCKS_PER_WORKER,
    CostLaw,
    default_block_tokens,
    fit_cost_law,
)
from umim_core.rules.grams import ORDERS
from umim_core.text.token_ids import UniformOffsets

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
GIB = 2.0**30


def phrases(tokens: int, seed: int = 5) -> np.ndarray:
    """Zipf's phrases of Zipf's words: the number of different n-grams grows as Heaps says."""
    rng = np.random.default_rng(seed)
    words, number = 5000, 20_000
    weights = 1 / np.arange(1, words + 1)
    lengths = rng.integers(1, 6, number)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    text = rng.choice(words, starts[-1], p=weights / weights.sum()).astype(np.int32)
    weights = 1 / np.arange(1, number + 1)
    chosen = rng.choice(number, tokens // 2, p=weights / weights.sum())
    return np.concatenate([text[starts[c] : starts[c + 1]] for c in chosen])[:tokens]


def counted(ids: np.ndarray, offsets: UniformOffsets, tau: int) -> dict[int, tuple[int, int]]:
    """Distinct candidates and frequent n-grams per order."""
    keys: dict[int, np.ndarray] = {}
    found = {}
    for n in ORDERS:
        counter = OrderCounter(n, rank_indexes(keys, n), excluded_mask(()), threads=1)
        counter.add(ids, offsets)
        keys[n], _ = counter.frequent(tau)
        found[n] = len(counter.table), len(keys[n])
    return found


def no_memory() -> float:
    return 0.0


@pytest.mark.parametrize("tau", [2, 5])
def test_four_times_the_sample_is_predicted_within_a_quarter(tau: int) -> None:
    sample = 1 << 17
    ids = phrases(4 * sample)
    offsets = UniformOffsets(256, len(ids) // 256)
    law = fit_cost_law(ids, offsets, tau, sample_tokens=sample, resident_bytes=no_memory)
    told = law.predict(offsets[-1])
    for n, (distinct, frequent) in counted(ids, offsets, tau).items():
        assert told.distinct[n] == pytest.approx(distinct, rel=0.25)
        assert told.frequent[n] == pytest.approx(frequent, rel=0.25)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_memory_of_the_tables_is_predicted_within_a_quarter(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small chunks, so that the tables and not the buffers are what is measured.
    chunk = 4096
    monkeypatch.setattr(prediction, "CHUNK_TOKENS", chunk)
    ids = phrases(1 << 19, seed)
    offsets = UniformOffsets(256, len(ids) // 256)
    with chunks_of(chunk):
        law = fit_cost_law(ids, offsets, 5, sample_tokens=1 << 17, resident_bytes=no_memory)
        told = law.predict(offsets[-1]).memory_bytes - ids.nbytes
        tracemalloc.start()
        count_ngrams(ids, offsets, 5, threads=1)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak > 2e6, "larger than empty tables"
    assert told == pytest.approx(peak, rel=0.25)


@pytest.mark.full
def test_prose_is_predicted_within_a_quarter() -> None:
    text = DATA / "wikitext-2" / "train.txt"
    model = DATA / "tokenizers" / "gpt2" / "tokenizer.json"
    if not (text.is_file() and model.is_file()):
        pytest.skip(f"WikiText-2 and the GPT-2 tokenizer are not at {DATA}")
    core = Tokenizer.from_file(str(model))
    ids = np.array(core.encode(text.read_text(encoding="utf-8")).ids, dtype=np.int32)
    offsets = UniformOffsets(512, len(ids) // 512)
    law = fit_cost_law(ids, offsets, 5, sample_tokens=len(ids) // 4, resident_bytes=no_memory)
    told = law.predict(offsets[-1])
    for n, (distinct, frequent) in counted(ids, offsets, 5).items():
        assert told.distinct[n] == pytest.approx(distinct, rel=0.25)
        assert told.frequent[n] == pytest.approx(frequent, rel=0.25)


def test_candidate_mode_is_predicted_too() -> None:
    ids = phrases(1 << 19)
    offsets = UniformOffsets(256, len(ids) // 256)
    sample = 1 << 17
    law = fit_cost_law(ids, offsets, SAMPLE_TAU, sample_tokens=sample, resident_bytes=no_memory)
    options = SearchOptions(20, sample_tokens=sample)
    _, report = find_ngrams(ids, offsets, options, LocalCounter(ids, offsets))
    assert report is not None
    told = law.predict_candidates(offsets[-1], sample, 10**7)
    assert sum(told.frequent.values()) == pytest.approx(report.candidates, rel=0.25)
    few = law.predict_candidates(offsets[-1], sample, 100)
    assert sum(few.frequent.values()) == pytest.approx(100)
    assert list(few.seconds) == ["count_sample", "recount"]
    # A larger corpus needs no larger tables, only room for its tokens.
    large, larger = (law.predict_candidates(k * offsets[-1], sample, 100) for k in (100, 200))
    assert larger.memory_bytes - large.memory_bytes == 4 * 100 * offsets[-1]
    assert large.seconds["recount"] == pytest.approx(100 * few.seconds["recount"])


def law(threads: int = 2) -> CostLaw:
    growth = {n: GrowthLaw(1e6, 5e5 / n, 0.8, 0.95) for n in ORDERS}
    frequent = {n: GrowthLaw(1e6, 2e4 / n, 0.9, 1.0) for n in ORDERS}
    return CostLaw(growth, frequent, dict.fromkeys(ORDERS, 1e-7), 2e-8, 3e8, threads, 5)


@given(
    sizes=st.lists(st.integers(1, 10**12), min_size=2, max_size=6).map(sorted),
    workers=st.none() | st.integers(1, 64),
)
def test_a_larger_corpus_never_costs_less(sizes: list[int], workers: int | None) -> None:
    found = [law().predict(size, workers=workers) for size in sizes]
    for name in ("memory_bytes", "disk_bytes", "shuffle_bytes"):
        values = [getattr(one, name) for one in found]
        # A cluster's block may be rounded up, which saves a message.
        assert all(later >= 0.999 * earlier for earlier, later in pairwise(values))
    totals = [sum(one.seconds.values()) for one in found]
    assert totals == sorted(totals)
    for one in found:
        assert all(one.frequent[n] <= law().distinct[n].at(one.tokens) for n in ORDERS)


def test_one_process_sends_nothing_and_a_cluster_divides_the_time() -> None:
    alone, cluster = law().predict(10**9), law(1).predict(10**9, workers=8)
    assert alone.shuffle_bytes == 0
    block = default_block_tokens(10**9, 8)
    blocks = -(-(10**9) // block)
    distinct = sum(law().distinct[n].at(block) for n in ORDERS)
    assert cluster.shuffle_bytes == pytest.approx(16 * blocks * distinct)
    assert cluster.memory_bytes < alone.memory_bytes
    for name, seconds in alone.seconds.items():
        assert cluster.seconds[name] == pytest.approx(seconds / 8)


@given(tokens=st.integers(1, 10**13), workers=st.integers(1, 1000))
def test_blocks_are_neither_tiny_nor_huge(tokens: int, workers: int) -> None:
    block = default_block_tokens(tokens, workers)
    assert 1 << 21 <= block <= 1 << 27
    blocks = -(-tokens // block)
    assert blocks <= BLOCKS_PER_WORKER * workers or block == 1 << 27


def told(memory: float = 1.0, disk: float = 1.0, hours: float = 1.0) -> Prediction:
    seconds = {"tokenize": hours * 1800, "count_2": hours * 1800}
    return Prediction(1_234_567, memory * GIB, disk * GIB, 0.0, seconds, {}, {})


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits.of(1.5, None, None), r"at most 1\.5 GiB of memory; got 2 GiB predicted"),
        (Limits.of(None, 1.5, None), r"at most 1\.5 GiB of disk; got 3 GiB predicted"),
        (Limits.of(None, None, 1.5), r"at most 1\.5 hours of time; got 4 hours predicted"),
        (Limits(1.0, 1.0, 1.0), "GiB of memory"),
    ],
)
def test_a_prediction_beyond_a_limit_is_refused(limits: Limits, message: str) -> None:
    with pytest.raises(ResourceLimitError, match=message) as caught:
        limits.check(told(2, 3, 4))
    assert "1,234,567 tokens. Raise tau or the limit, or use candidate mode" in str(caught.value)


def test_a_prediction_at_its_limits_passes() -> None:
    Limits.of(2, 3, 4).check(told(2, 3, 4))
    Limits().check(told(1e9, 1e9, 1e9))


def test_a_prediction_has_a_table_and_a_json_form() -> None:
    one = law().predict(10**9)
    rows = dict(line.strip().rsplit("  ", 1) for line in one.lines())
    names = [name.strip() for name in rows]
    assert names[:4] == ["tokens", "memory of a process", "disk", "shuffled"]
    assert names[-3:] == ["frequent 2-grams", "frequent 3-grams", "frequent 4-grams"]
    assert one.as_dict()["tokens"] == 10**9
    assert set(one.as_dict()) == set(Prediction.__dataclass_fields__)


def test_too_few_segments_for_a_prediction_are_refused() -> None:
    with pytest.raises(RuleSetError, match=r"at least 64 segments; got 63\. Mine"):
        fit_cost_law(np.zeros(630, np.int32), UniformOffsets(10, 63), 5, resident_bytes=no_memory)


def test_the_memory_of_the_process_is_asked_for_once_and_counts() -> None:
    asked = []

    def resident() -> float:
        asked.append(1)
        return 7e9

    ids = phrases(6400)
    one = fit_cost_law(ids, UniformOffsets(100, 64), 2, threads=2, resident_bytes=resident)
    assert (len(asked), one.base_bytes, one.threads) == (1, 7e9, 2)
    assert one.predict(6400).memory_bytes > 7e9
