"""Choice of tokens and stopping, alone and against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from support.engine_matrix import (
    VOCAB,
    build,
    merging_engine,
    random_prompts,
    random_rules,
    settings,
)
from support.tiny_models import letter_tokenizer, written_by_transformers
from umim_core.errors import GenerationError, NumericalError
from umim_core.inference.choice import Stopper, TokenChooser
from umim_core.inference.engine import Engine
from umim_core.inference.options import GenerateOptions
from umim_core.merging.merged_model import MergedModel


def plain(name: str = "gpt2", dtype: torch.dtype = torch.float64) -> Engine:
    return Engine(MergedModel.without_merging(build(name, dtype)))


def test_sampling_draws_from_the_distribution() -> None:
    draws, logits = 5_000, torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    config = GenerationConfig(max_new_tokens=1, do_sample=True, temperature=2)
    chooser = TokenChooser(config, [1], seed=3)
    counts = torch.zeros(4)
    for _ in range(draws):
        counts[chooser.choose(logits, [[0]])[0]] += 1
    expected = (logits[0] / 2.0).softmax(-1)
    # three standard errors of each frequency
    error = 3 * (expected * (1 - expected) / draws).sqrt()
    assert bool(((counts / draws - expected).abs() < error).all())


def test_a_top_k_of_one_chooses_the_first_of_equal_logits() -> None:
    tied = torch.tensor([[1.0, 3.0, 3.0, 3.0]])
    config = GenerationConfig(max_new_tokens=1, do_sample=True, top_k=1)
    greedy = TokenChooser(GenerationConfig(max_new_tokens=1), [1], None).choose(tied, [[0]])
    chooser = TokenChooser(config, [1] * 64, seed=None)
    assert chooser.choose(tied.expand(64, 4), [[0]] * 64) == greedy * 64


def test_a_stop_string_may_span_tokens_but_not_begin_in_the_prompt() -> None:
    config = GenerationConfig(max_new_tokens=9, stop_strings=["bc"])
    stopper = Stopper(config, letter_tokenizer("abcdef"))
    assert stopper.reason([0, 0, 1, 2], 1) is None
    assert stopper.reason([0, 0, 1, 2, 1, 2], 3) == "stop_string"
    with pytest.raises(GenerationError, match="stop strings need a tokenizer"):
        Stopper(config, None)
    with pytest.raises(GenerationError, match="that can encode Latin letters"):
        Stopper(config, letter_tokenizer("xyz"))


@pytest.mark.parametrize(
    "options",
    [
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[1], [2, 3]]},
        {"suppress_tokens": [0, 4, 5]},
        {"min_new_tokens": 6, "eos_token_id": 3},
        {"min_length": 16, "eos_token_id": 3},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3, "suppress_tokens": [2]},
        {"sequence_bias": [[[1], 4.0], [[2, 3], -6.0]]},
    ],
    ids=lambda options: "+".join(options),
)
def test_processors_give_what_transformers_gives(options: dict[str, object]) -> None:
    engine, prompts = plain("llama"), random_prompts(11, 6)
    ours = engine.generate(prompts, settings(24, **options)).rows
    assert ours != engine.generate(prompts, settings(24)).rows
    for prompt, row in zip(prompts, ours, strict=True):
        model = engine.backbone.model
        theirs = written_by_transformers(model, prompt, 24, do_sample=False, **options)
        assert list(row.ids) == theirs


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.5},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.95},
        {"repetition_penalty": 1.7, "suppress_tokens": [5, 9], "temperature": 2.0, "top_k": 0},
        {"epsilon_cutoff": 0.02, "eta_cutoff": 0.1},
    ],
)
def test_tokens_are_drawn_from_the_distribution_of_transformers(options: dict[str, object]) -> None:
    """With its top-k by default, and processors before warpers."""
    backbone, prompt = build("llama", vocab_size=90), random_prompts(11, 1)[0].tolist()
    ids = torch.tensor([prompt])
    asked = {"do_sample": True, "max_new_tokens": 1, "pad_token_id": 0, **options}
    whole = {"output_scores": True, "return_dict_in_generate": True}
    [theirs] = backbone.model.generate(ids, **asked, **whole).scores
    config = GenerateOptions(config=GenerationConfig(**asked)).of_model(backbone).settings
    chooser = TokenChooser(config, [len(prompt)], seed=0)
    ours = chooser._processed(backbone.model(ids).logits[:, -1], [prompt])
    torch.testing.assert_close(ours.softmax(-1), theirs.double().softmax(-1))


def test_a_processor_sees_each_rows_raw_ids() -> None:
    seen: list[list[int]] = []

    def successor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids[0].tolist())
        masked = torch.full_like(scores, -torch.inf)
        masked[0, (int(input_ids[0, -1]) + 1) % VOCAB] = 0.0
        return masked

    engine = merging_engine(build("gpt2"), random_rules(1, infix_free=False))
    rows = engine.generate([[3], [7, 8, 9]], settings(4, logits_processor=[successor])).rows
    assert [row.ids for row in rows] == [(4, 5, 6, 7), (10, 0, 1, 2)]
    assert seen[-2:] == [[3, 4, 5, 6], [7, 8, 9, 10, 0, 1]]


def test_a_processor_that_writes_in_place_changes_no_log_probability() -> None:
    def without_even(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, ::2] = -torch.inf
        return scores

    engine = plain(dtype=torch.float32)
    options = settings(1, logits_processor=[without_even], logprobs=VOCAB)
    [row], [free] = (engine.generate([[3]], o).rows for o in (options, settings(1, logprobs=VOCAB)))
    assert row.ids[0] % 2 == 1
    assert row.top_logprobs == free.top_logprobs


def test_a_criterion_ends_each_row_by_its_raw_ids() -> None:
    def longer(input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        return torch.tensor([input_ids.shape[1] > 6] * len(input_ids))

    engine = merging_engine(build("gpt2"), random_rules(1, infix_free=False))
    rows = engine.generate([[1], [1, 2, 3, 4]], settings(20, stopping_criteria=[longer])).rows
    assert [(len(row.ids), row.stop_reason) for row in rows] == [(6, "criteria"), (3, "criteria")]


def test_a_request_that_takes_too_long_ends() -> None:
    [row] = plain().generate([[1]], settings(80, max_time=1e-9)).rows
    assert (len(row.ids), row.stop_reason) == (1, "criteria")


def test_a_row_without_a_finite_score_is_refused() -> None:
    with pytest.raises(NumericalError, match="highest score -inf"):
        plain().generate([[1]], settings(2, suppress_tokens=list(range(VOCAB))))
    broken = plain("gpt2-untied")
    with torch.no_grad():
        broken.backbone.head_weight.fill_(float("nan"))
    for options in ({}, {"do_sample": True}):
        with pytest.raises(NumericalError, match="finite score"):
            broken.generate([[1]], settings(2, **options))
