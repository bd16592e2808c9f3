"""The count on Ray against the count in one process, for several block sizes (reliability 35).

The quick set counts on Ray in ``flows/test_full_pipeline.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from support.tiny_mining import LENGTH, TAU, skewed_ids
from support.token_artifacts import write_documents
from tasks.data.counting import ClusterCounter, Corpus
from umim_core.errors import CorpusError
from umim_core.mining.counting import count_ngrams
from umim_core.rules.grams import ORDERS, NgramCounts
from umim_core.text.token_ids import MAX_TOKEN_ID, segment_borders
from umim_core.text.tokens import IDS

EMPTY = np.zeros(0, dtype=np.int64)


def ragged() -> tuple[np.ndarray, np.ndarray]:
    """Twelve segments of 0 to 39 tokens over the four highest ids, one of them empty."""
    rng = np.random.default_rng(7)
    sizes = rng.integers(0, 40, 12)
    sizes[5] = 0
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return (MAX_TOKEN_ID - rng.integers(0, 4, offsets[-1])).astype(np.int32), offsets


def assert_equal(got: NgramCounts, want: NgramCounts) -> None:
    assert got.tau == want.tau
    assert got.orders == want.orders
    for n in want.orders:
        assert got.keys[n].tolist() == want.keys[n].tolist()
        assert got.support[n].tolist() == want.support[n].tolist()
        assert got.keys[n].dtype == got.support[n].dtype == np.int64


@pytest.mark.full
@pytest.mark.parametrize(("block_tokens", "longest"), [(90, 4), (90, 16), (1 << 21, 6)])
def test_equals_the_count_in_one_process_whatever_the_blocks(
    two_cores: None, tmp_path: Path, block_tokens: int, longest: int
) -> None:
    ids, offsets = ragged()
    ids[60:100] = ids[:40]
    ids[150:190] = ids[:40]
    excluded = (MAX_TOKEN_ID - 2,)
    want = count_ngrams(ids, offsets, 2, excluded, longest=longest)
    assert all(len(want.keys[n]) > 1 for n in range(2, min(longest, 7)))
    write_documents(tmp_path, ids)
    counter = ClusterCounter(Corpus(tmp_path, offsets, excluded), block_tokens, longest=longest)
    assert_equal(counter.count(2), want)


@pytest.mark.full
def test_a_corpus_without_ngrams_has_no_counts(two_cores: None, tmp_path: Path) -> None:
    write_documents(tmp_path, np.full(2, 7, dtype=np.int32))
    got = ClusterCounter(Corpus(tmp_path, np.array([0, 0, 1, 2]))).count(1)
    assert_equal(got, NgramCounts(dict.fromkeys(ORDERS, EMPTY), dict.fromkeys(ORDERS, EMPTY), 1))


@pytest.mark.full  # the quick error of a worker is that of a broken file: test_tokenizing.py
def test_the_typed_error_of_a_worker_reaches_the_caller(
    two_cores: None, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_documents(tmp_path, skewed_ids(6000))
    np.lib.format.open_memmap(tmp_path / IDS, "r+")[4321] = -3
    corpus = Corpus(tmp_path, segment_borders(6000, LENGTH))
    with pytest.raises(CorpusError) as caught:
        ClusterCounter(corpus, block_tokens=1000).count(TAU)
    assert type(caught.value) is CorpusError
    told = r"corpus: token ids must lie in 0\.\.262143; got -3 at position \d+\. Check the t.*"
    assert re.fullmatch(told, str(caught.value)), "one line, without the advice of Ray"
    assert "Traceback" not in capfd.readouterr().err
