from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from support.ngram_oracle import filtered
from umim_core.config.rule_options import Containment
from umim_core.mining.counting import count_ngrams
from umim_core.rules.grams import NgramCounts, select
from umim_core.rules.matcher import Matcher
from umim_core.text.token_ids import segment_borders

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
LENGTH = 512
# tau -> n-grams per order: frequent, after the overlap filter, after both filters
FIGURES = {
    5: ((71456, 45681, 22154), (18227, 20404, 11542), (10131, 13148, 11542)),
    50: ((3674, 1293, 627), (1147, 625, 324), (860, 487, 324)),
}
REDUCTION = {(5, "drop"): 28.52, (5, "keep"): 39.97, (50, "drop"): 20.35, (50, "keep"): 30.23}


def tokenize(split: str) -> np.ndarray:
    text = DATA / "wikitext-2" / f"{split}.txt"
    model = DATA / "tokenizers" / "gpt2" / "tokenizer.json"
    if not (text.is_file() and model.is_file()):
        pytest.skip(f"WikiText-2 and the GPT-2 tokenizer are not at {DATA}")
    encoding = Tokenizer.from_file(str(model)).encode(
        text.read_text(encoding="utf-8"), add_special_tokens=False
    )
    return np.array(encoding.ids, dtype=np.int32)


@pytest.fixture(scope="module")
def counts() -> NgramCounts:
    stream = tokenize("train")
    assert len(stream) == 2_448_382
    offsets = segment_borders(len(stream), LENGTH)
    assert len(offsets) == 1 + 4_781
    return count_ngrams(stream, offsets, 5, excluded=[50256])


@pytest.fixture(scope="module")
def held_out() -> tuple[np.ndarray, np.ndarray]:
    stream = tokenize("test")
    offsets = np.array(segment_borders(len(stream), LENGTH))
    return stream[: offsets[-1]], offsets


@pytest.mark.full
@pytest.mark.parametrize(("tau", "containment"), REDUCTION)
def test_rule_counts_and_token_reduction_are_those_of_the_oracle(
    counts: NgramCounts, held_out: tuple[np.ndarray, np.ndarray], tau: int, containment: Containment
) -> None:
    rules = filtered(counts, tau=tau, containment=containment, segment_length=LENGTH)
    frequent, overlap, both = FIGURES[tau]
    assert tuple(map(len, select(counts, tau).keys.values())) == frequent
    assert tuple(rules.counts_by_order.values()) == (both if containment == "drop" else overlap)
    ids, offsets = held_out
    starts, lengths, _ = Matcher(rules).segment_many(ids, offsets)
    assert int(lengths.sum()) == len(ids)
    reduction = 100 * (len(ids) - len(starts)) / len(ids)
    assert round(reduction, 2) == REDUCTION[tau, containment]
