"""Predicted costs against what counting a corpus four times as large really takes."""

from __future__ import annotations

import re
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from support.ngram_oracle import chunks_of
from umim_core.cost import mining_law
from umim_core.cost.mining_law import GrowthLaw, MiningLaw, default_block_tokens, fit_mining_law
from umim_core.errors import RuleSetError
from umim_core.mining.candidates import SAMPLE_TAU
from umim_core.mining.counting import OrderCounter, count_ngrams, excluded_mask
from umim_core.mining.finding import LocalCounter, find_ngrams
from umim_core.mining.hashing import rank_indexes
from umim_core.mining.mining_options import SearchOptions
from umim_core.rules.grams import ORDERS
from umim_core.text.token_ids import UniformOffsets

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
PLAIN = SearchOptions(5)


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
    law = fit_mining_law(ids, offsets, tau, sample_tokens=sample, resident_bytes=no_memory)
    told = law.predict(offsets[-1], SearchOptions(law.tau))
    for n, (distinct, frequent) in counted(ids, offsets, tau).items():
        assert told.figures["distinct"][n] == pytest.approx(distinct, rel=0.25)
        assert told.figures["frequent"][n] == pytest.approx(frequent, rel=0.25)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_memory_of_the_tables_is_predicted_within_a_quarter(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small chunks, so that the tables and not the buffers are what is measured.
    chunk = 4096
    monkeypatch.setattr(mining_law, "CHUNK_TOKENS", chunk)
    ids = phrases(1 << 19, seed)
    offsets = UniformOffsets(256, len(ids) // 256)
    with chunks_of(chunk):
        law = fit_mining_law(ids, offsets, 5, sample_tokens=1 << 17, resident_bytes=no_memory)
        told = law.predict(offsets[-1], SearchOptions(law.tau)).memory_bytes - ids.nbytes
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
    law = fit_mining_law(ids, offsets, 5, sample_tokens=len(ids) // 4, resident_bytes=no_memory)
    told = law.predict(offsets[-1], SearchOptions(law.tau))
    for n, (distinct, frequent) in counted(ids, offsets, 5).items():
        assert told.figures["distinct"][n] == pytest.approx(distinct, rel=0.25)
        assert told.figures["frequent"][n] == pytest.approx(frequent, rel=0.25)


def test_candidate_mode_is_predicted_too() -> None:
    ids = phrases(1 << 19)
    offsets = UniformOffsets(256, len(ids) // 256)
    sample = 1 << 17
    law = fit_mining_law(ids, offsets, SAMPLE_TAU, sample_tokens=sample, resident_bytes=no_memory)
    options = SearchOptions(20, sample_tokens=sample)
    _, report = find_ngrams(ids, offsets, options, LocalCounter(ids, offsets))
    assert report is not None
    told = law.predict(offsets[-1], options)
    assert sum(told.figures["frequent"].values()) == pytest.approx(report.candidates, rel=0.25)
    fewer = replace(options, max_candidates=100)
    few = law.predict(offsets[-1], fewer)
    assert sum(few.figures["frequent"].values()) == pytest.approx(100)
    assert list(few.seconds) == ["count_sample", "recount"]
    # A larger corpus needs no larger tables, only room for its tokens.
    large, larger = (law.predict(k * offsets[-1], fewer) for k in (100, 200))
    assert larger.memory_bytes - large.memory_bytes == 4 * 100 * offsets[-1]
    assert large.seconds["recount"] == pytest.approx(100 * few.seconds["recount"])


def law(threads: int = 2) -> MiningLaw:
    growth = {n: GrowthLaw(1e6, 5e5 / n, 0.8, 0.95) for n in ORDERS}
    frequent = {n: GrowthLaw(1e6, 2e4 / n, 0.9, 1.0) for n in ORDERS}
    return MiningLaw(growth, frequent, dict.fromkeys(ORDERS, 1e-7), 2e-8, 3e8, threads, 5)


@given(
    sizes=st.lists(st.integers(1, 10**12), min_size=2, max_size=6).map(sorted),
    workers=st.none() | st.integers(1, 64),
)
def test_a_larger_corpus_never_costs_less(sizes: list[int], workers: int | None) -> None:
    found = [law().predict(size, PLAIN, workers=workers) for size in sizes]
    for name in ("memory_bytes", "disk_bytes", "shuffle_bytes"):
        values = [one.as_dict()[name] for one in found]
        # A cluster's block may be rounded up, which saves a message.
        assert all(later >= 0.999 * earlier for earlier, later in pairwise(values))
    totals = [sum(one.seconds.values()) for one in found]
    assert totals == sorted(totals)
    for one in found:
        assert all(
            one.figures["frequent"][n] <= law().distinct[n].at(one.figures["tokens"])
            for n in ORDERS
        )


def test_one_process_sends_nothing_and_a_cluster_divides_the_time() -> None:
    alone, cluster = law().predict(10**9, PLAIN), law(1).predict(10**9, PLAIN, workers=8)
    assert alone.figures["shuffle_bytes"] == 0
    block = default_block_tokens(10**9, 8)
    blocks = -(-(10**9) // block)
    distinct = sum(law().distinct[n].at(block) for n in ORDERS)
    assert cluster.figures["shuffle_bytes"] == pytest.approx(16 * blocks * distinct)
    assert cluster.memory_bytes < alone.memory_bytes
    for name, seconds in alone.seconds.items():
        assert cluster.seconds[name] == pytest.approx(seconds / 8)


@given(tokens=st.integers(1, 10**13), workers=st.integers(1, 1000))
def test_blocks_are_neither_tiny_nor_huge(tokens: int, workers: int) -> None:
    block = default_block_tokens(tokens, workers)
    assert 1 << 21 <= block <= 1 << 27
    blocks = -(-tokens // block)
    assert blocks <= workers or block == 1 << 27


def test_a_prediction_has_lines_and_a_json_form() -> None:
    one = law().predict(10**9, PLAIN)
    rows = dict(re.split(r"  +", line.strip()) for line in one.lines())
    assert list(rows) == [
        "for",
        "memory of a process",
        "disk",
        *(f"time, count {n}" for n in ORDERS),
        "time, all",
        "shuffled",
        *(f"frequent {n}-grams" for n in ORDERS),
        "fitted on",
    ]
    assert rows["for"] == "1,000,000,000 tokens"
    assert rows["fitted on"] == "a sample of 1,000,000 tokens"
    assert one.as_dict()["tokens"] == 10**9
    assert set(one.as_dict()) >= {"memory_bytes", "disk_bytes", "seconds", "distinct", "frequent"}


def test_too_few_segments_for_a_prediction_are_refused() -> None:
    with pytest.raises(RuleSetError, match=r"at least 64 segments; got 63\. Mine"):
        fit_mining_law(np.zeros(630, np.int32), UniformOffsets(10, 63), 5, resident_bytes=no_memory)


def test_the_memory_of_the_process_is_asked_for_once_and_counts() -> None:
    asked = []

    def resident() -> float:
        asked.append(1)
        return 7e9

    ids = phrases(6400)
    one = fit_mining_law(ids, UniformOffsets(100, 64), 2, threads=2, resident_bytes=resident)
    assert (len(asked), one.base_bytes, one.threads) == (1, 7e9, 2)
    assert one.predict(6400, PLAIN).memory_bytes > 7e9


SIZES = [1 << 17, 1 << 18, 1 << 19, 1 << 20]


def by_doublings(first: float, exponent: float, decay: float, count: int) -> list[float]:
    """Multiply step by step: each doubling of the corpus has ``decay`` times the last exponent."""
    values = [first]
    for _ in range(count):
        values.append(values[-1] * 2**exponent)
        exponent *= decay
    return values


@given(
    exponent=st.floats(0.2, 1.0),
    decay=st.floats(0.6, 1.0),
    first=st.floats(1e5, 1e9),
)
def test_a_synthetic_law_is_recovered(exponent: float, decay: float, first: float) -> None:
    truth = by_doublings(first, exponent, decay, 9)
    law = GrowthLaw.fit(SIZES, [round(value) for value in truth[:4]])
    assert law.decay == pytest.approx(decay, abs=0.01)
    assert law.exponent == pytest.approx(exponent * decay**3, rel=0.02)
    for doublings in range(6):
        assert law.at(SIZES[-1] << doublings) == pytest.approx(truth[3 + doublings], rel=0.03)


@given(
    values=st.lists(st.integers(0, 10**12), min_size=4, max_size=4).map(sorted),
    at=st.lists(st.floats(0, 1e15), min_size=2, max_size=8).map(sorted),
)
def test_it_never_falls_whatever_was_seen(values: list[int], at: list[float]) -> None:
    law = GrowthLaw.fit(SIZES, values)
    found = [law.at(tokens) for tokens in at]
    assert found == sorted(found)
    assert law.at(SIZES[-1]) == values[-1]
    assert 0.5 <= law.decay <= 1.0


def test_growth_that_speeds_up_is_continued_as_a_power() -> None:
    law = GrowthLaw.fit(SIZES, [100, 110, 140, 300])
    assert law.decay == 1.0
    assert law.at(SIZES[-1] * 4) / law.at(SIZES[-1] * 2) == pytest.approx(2**law.exponent)


def test_what_stopped_growing_hardly_grows() -> None:
    law = GrowthLaw.fit(SIZES, [500, 500, 500, 500])
    assert 500 <= law.at(1e12) < 520


def test_what_never_occurred_is_not_expected() -> None:
    assert GrowthLaw.fit(SIZES, [0, 0, 0, 0]).at(1e12) == 0.0
