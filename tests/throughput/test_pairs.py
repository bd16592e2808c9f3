"""Fixed pairs: the token reduction asked for, in prompt and decode alike."""

from __future__ import annotations

import numpy as np
import pytest

from umim_core.errors import ConfigError
from umim_core.inference.rows import GeneratedUnits
from umim_core.throughput.throughput import FixedPairs

REDUCTIONS = [0.05, 0.1, 0.25, 0.4, 0.5]


def test_every_second_pair_is_merged_at_half_the_reduction() -> None:
    starts, lengths = FixedPairs(0.25).segment(np.arange(1, 10))
    assert starts.tolist() == [0, 1, 2, 4, 5, 6, 8]
    assert lengths.tolist() == [1, 1, 2, 1, 1, 2, 1]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_reduction_asked_for_is_realised(reduction: float) -> None:
    starts, lengths = FixedPairs(reduction).segment(np.arange(400))
    assert 1 - len(starts) / 400 == pytest.approx(reduction)
    assert np.array_equal(starts, np.cumsum(lengths) - lengths)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_decoding_merges_the_pairs_of_the_whole_text(reduction: float) -> None:
    pairs, text = FixedPairs(reduction), np.arange(41)
    units = GeneratedUnits(pairs, rows=1)
    for token in text:
        units.push(np.array([token]), np.array([True]))
    starts, lengths = pairs.segment(text)
    merged = [(s, n) for s, n in zip(starts.tolist(), lengths.tolist(), strict=True) if n == 2]
    assert list(units.spans(0)) == merged


@pytest.mark.parametrize("prompt", [5, 6])
def test_a_row_goes_on_where_its_prompt_ended(prompt: int) -> None:
    pairs, text = FixedPairs(0.25), np.arange(30)
    suffixes = pairs.suffixes(1)
    suffixes.resume(0, text[:prompt], pairs.segment(text[:prompt])[0])
    units = len(pairs.segment(text[:prompt])[0])
    for token in text[prompt:]:
        units += 1 - int(suffixes.advance(np.array([token]), np.array([True])).rollback[0])
    assert units == len(pairs.segment(text)[0])


@pytest.mark.parametrize("reduction", [0.0, 0.51, -0.1])
def test_a_reduction_that_pairs_cannot_give_is_refused(reduction: float) -> None:
    with pytest.raises(ConfigError, match=r"above 0 and at most 0\.5"):
        FixedPairs(reduction)
