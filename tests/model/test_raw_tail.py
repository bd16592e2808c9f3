"""Prompts and contexts whose last tokens stay raw, through the public model."""

from __future__ import annotations

import numpy as np
import pytest

from umim_core import UMIM
from umim_core.errors import ConfigError
from umim_core.evaluation.perplexity import perplexity

TEXT = "w1 w2 w9 w3 w4 w5 w6 w7 w8 w9 w1"  # w1 w2, w3 w4 w5 and w6 w7 w8 w9 merge


@pytest.mark.parametrize(
    ("raw_tail", "lengths"),
    [
        (0, (2, 1, 3, 4, 1)),
        (1, (2, 1, 3, 4, 1)),
        (2, (2, 1, 3, 1, 1, 1, 1, 1)),
        (9, (2, *[1] * 9)),
        (10, (1,) * 11),
        (99, (1,) * 11),
    ],
)
def test_the_units_of_a_prompt_are_those_of_its_compression(
    tiny_umim: UMIM, raw_tail: int, lengths: tuple[int, ...]
) -> None:
    compression = tiny_umim.compress(TEXT, raw_tail=raw_tail)
    assert compression.unit_lengths == lengths
    output = tiny_umim.generate(TEXT, max_new_tokens=1, raw_tail=raw_tail)
    assert output.prompt_spans == (compression.spans,)
    assert output.token_reduction == (compression.token_reduction,)
    assert output.cache_lengths == ((len(lengths),),)


def test_a_negative_raw_tail_is_refused(tiny_umim: UMIM) -> None:
    for use in (tiny_umim.compress, tiny_umim.generate):
        with pytest.raises(ConfigError, match="raw_tail must be an integer of at least 0; got -1"):
            use(TEXT, raw_tail=-1)


@pytest.mark.parametrize("raw_tail", [0, 4, 99])
def test_a_context_is_read_as_a_prompt_is(tiny_umim: UMIM, raw_tail: int) -> None:
    options = {"max_new_tokens": 1, "logprobs": tiny_umim.backbone.vocab_size}
    output = tiny_umim.generate(TEXT, raw_tail=raw_tail, **options)
    table = dict(output.top_logprobs[0][0])
    [found] = tiny_umim.score([TEXT], [["w4", "w5"]], raw_tail=raw_tail)
    assert found == pytest.approx([table[4], table[5]], abs=1e-5)
    [base] = tiny_umim.score([TEXT], [["w4", "w5"]], merge="none")
    assert (found == pytest.approx(base, abs=1e-5)) == (raw_tail == 99)


def test_perplexity_has_no_prompt_and_no_raw_tail(tiny_umim: UMIM) -> None:
    rows = [np.array(tiny_umim.backbone.encode(TEXT))]
    tailed = perplexity(rows, tiny_umim.merged_model.reading("all", 5))
    assert tailed == perplexity(rows, tiny_umim.merged_model)
