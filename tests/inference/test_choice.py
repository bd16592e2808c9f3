"""Choice of tokens and stopping, alone and against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from support.engine_matrix import VOCAB, build, module_for, random_prompts, random_rules, settings
from support.tiny_models import letter_tokenizer, written_by_transformers
from umim_core.errors import GenerationError, NumericalError
from umim_core.inference.choice import Stopper, TokenChooser
from umim_core.inference.engine import Engine
from umim_core.merging.merged_model import MergedModel

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


@pytest.mark.parametrize(
    "options",
    [
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[1], [2, 3]]},
        {"suppress_tokens": [0, 4, 5]},
        {"min_new_tokens": 6, "eos_token_id": 3},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3, "suppress_tokens": [2]},
        {"sequence_bias": [[[1], 4.0], [[2, 3], -6.0]]},
    ],
    ids=lambda options: "+".join(options),
)
def test_processors_give_what_transformers_gives(options: dict[str, object]) -> None:
    backbone = build("llama")
    engine = Engine(MergedModel.without_merging(backbone))
    prompts = random_prompts(11, 6)
    ours = engine.generate(prompts, settings(24, **options)).rows
    plain = engine.generate(prompts, settings(24)).rows
    assert [row.ids for row in ours] != [row.ids for row in plain]
    for prompt, row in zip(prompts, ours, strict=True):
        theirs = written_by_transformers(backbone.model, prompt, 24, do_sample=False, **options)
        assert list(row.ids) == theirs


class _Only(LogitsProcessor):
    """Allow the successor of the newest raw id alone, and note what it was given."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids[0].tolist())
        masked = torch.full_like(scores, -torch.inf)
        masked[0, (int(input_ids[0, -1]) + 1) % VOCAB] = 0.0
        return masked


def test_a_processor_sees_each_rows_raw_ids() -> None:
    backbone, processor = build("gpt2"), _Only()
    engine = Engine(MergedModel(backbone, module_for(backbone), random_rules(1, infix_free=False)))
    rows = engine.generate(
        [[3], [7, 8, 9]], settings(4, logits_processor=LogitsProcessorList([processor]))
    ).rows
    assert [row.ids for row in rows] == [(4, 5, 6, 7), (10, 0, 1, 2)]
    assert processor.seen[-2:] == [[3, 4, 5, 6], [7, 8, 9, 10, 0, 1]]


class _WithoutEven(LogitsProcessor):
    """Rule out every other id, in place."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, ::2] = -torch.inf
        return scores


def test_a_processor_that_writes_in_place_changes_no_log_probability() -> None:
    engine = Engine(MergedModel.without_merging(build("gpt2", torch.float32)))
    options = {"logits_processor": LogitsProcessorList([_WithoutEven()]), "logprobs": VOCAB}
    [row] = engine.generate([[3]], settings(1, **options)).rows
    [plain] = engine.generate([[3]], settings(1, logprobs=VOCAB)).rows
    assert row.ids[0] % 2 == 1
    assert row.top_logprobs == plain.top_logprobs


class _LongerThan(StoppingCriteria):
    """Stop texts of more than six raw ids."""

    def __call__(
        self, input_ids: torch.Tensor, scores: object, **kwargs: object
    ) -> torch.BoolTensor:
        done = torch.tensor([input_ids.shape[1] > 6] * len(input_ids))
        return done  # type: ignore[return-value]  # a bool tensor


def test_a_criterion_ends_each_row_by_its_raw_ids() -> None:
    backbone = build("gpt2")
    engine = Engine(MergedModel(backbone, module_for(backbone), random_rules(1, infix_free=False)))
    rows = engine.generate(
        [[1], [1, 2, 3, 4]],
        settings(20, stopping_criteria=StoppingCriteriaList([_LongerThan()])),
    ).rows
    assert [(len(row.ids), row.stop_reason) for row in rows] == [(6, "criteria"), (3, "criteria")]


def test_a_request_that_takes_too_long_ends() -> None:
    [row] = (
        Engine(MergedModel.without_merging(build("gpt2")))
        .generate([[1]], settings(80, max_time=1e-9))
        .rows
    )
    assert (len(row.ids), row.stop_reason) == (1, "criteria")


class _Record(BaseStreamer):
    """Keep what is put."""

    def __init__(self) -> None:
        self.values: list[list[object]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_gets_the_prompt_and_every_token_as_in_transformers() -> None:
    backbone, ours, theirs = build("gpt2"), _Record(), _Record()
    Engine(MergedModel.without_merging(backbone)).generate([[1, 2, 3]], settings(5, streamer=ours))
    backbone.model.generate(
        torch.tensor([[1, 2, 3]]),
        attention_mask=torch.ones(1, 3, dtype=torch.int64),
        max_new_tokens=5,
        do_sample=False,
        pad_token_id=0,
        streamer=theirs,
    )
    assert (ours.values, ours.ended) == (theirs.values, theirs.ended)


def test_scores_that_are_no_numbers_are_refused() -> None:
    backbone = build("gpt2-untied")
    with torch.no_grad():
        backbone.head_weight.fill_(float("nan"))
    for options in ({}, {"do_sample": True}):
        with pytest.raises(NumericalError, match="finite score"):
            Engine(MergedModel.without_merging(backbone)).generate([[1]], settings(2, **options))


def test_ruling_out_every_token_is_refused() -> None:
    with pytest.raises(NumericalError, match="highest score -inf"):
        Engine(MergedModel.without_merging(build("gpt2"))).generate(
            [[1]], settings(2, suppress_tokens=list(range(VOCAB)))
        )
