"""Token choice and stopping against transformers' own generate, and the settings refused."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from support.tiny_models import letter_tokenizer
from umim_core.errors import GenerationError
from umim_core.inference.sampling import TokenChooser
from umim_core.inference.stopping import Stopper

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 3.0, 0.0]])


def choose(
    config: GenerationConfig, seed: int = 0, ids: list[list[int]] | None = None
) -> list[int]:
    return TokenChooser(config, [1, 1], seed).choose(LOGITS, ids or [[0], [0]])


def test_without_sampling_the_most_probable_token_wins() -> None:
    assert choose(GenerationConfig(max_new_tokens=1)) == [0, 2]


def test_sampling_draws_from_the_distribution() -> None:
    draws = 20_000
    config = GenerationConfig(max_new_tokens=1, do_sample=True, temperature=2.0)
    chooser = TokenChooser(config, [1], seed=3)
    logits = LOGITS[:1]
    counts = torch.zeros(4)
    for _ in range(draws):
        counts[chooser.choose(logits, [[0]])[0]] += 1
    expected = (logits[0] / 2.0).softmax(-1)
    # three standard errors of each frequency
    error = 3 * (expected * (1 - expected) / draws).sqrt()
    assert bool(((counts / draws - expected).abs() < error).all())


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.8}])
def test_filtered_tokens_are_never_drawn(options: dict[str, float]) -> None:
    config = GenerationConfig(max_new_tokens=1, do_sample=True, **options)
    chooser = TokenChooser(config, [1], seed=0)
    assert {chooser.choose(LOGITS[:1], [[0]])[0] for _ in range(300)} == {0, 1}


def test_equal_seeds_give_equal_draws_and_other_seeds_other_draws() -> None:
    config = GenerationConfig(max_new_tokens=1, do_sample=True, temperature=5.0)

    def draws(seed: int) -> list[list[int]]:
        chooser = TokenChooser(config, [1, 1], seed)
        return [chooser.choose(LOGITS, [[0], [0]]) for _ in range(20)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


def test_a_rows_draws_do_not_depend_on_the_rows_beside_it() -> None:
    config = GenerationConfig(max_new_tokens=1, do_sample=True, temperature=5.0)
    alone, beside = TokenChooser(config, [1], 4), TokenChooser(config, [1, 1], 4)
    for _ in range(20):
        assert alone.choose(LOGITS[:1], [[0]])[0] == beside.choose(LOGITS, [[0], [0]])[0]


def test_a_repetition_penalty_sees_each_rows_own_raw_ids() -> None:
    config = GenerationConfig(max_new_tokens=1, repetition_penalty=3.0)
    assert choose(config, ids=[[0], [0, 1, 3]]) == [1, 2]


def test_a_stop_string_may_span_tokens() -> None:
    tokenizer = letter_tokenizer("abcdef")
    stopper = Stopper(GenerationConfig(max_new_tokens=9, stop_strings=["bc"]), tokenizer)
    assert stopper.reason([0, 0, 1], 1) is None
    assert stopper.reason([0, 0, 1, 2], 2) == "stop_string"


def test_a_stop_string_that_begins_in_the_prompt_ends_nothing() -> None:
    stopper = Stopper(
        GenerationConfig(max_new_tokens=9, stop_strings=["bc"]), letter_tokenizer("abcdef")
    )
    assert stopper.reason([0, 0, 1, 2], 1) is None
    assert stopper.reason([0, 0, 1, 2, 1, 2], 3) == "stop_string"


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(GenerationError, match="stop strings need a tokenizer"):
        Stopper(GenerationConfig(max_new_tokens=9, stop_strings=["x"]), None)
