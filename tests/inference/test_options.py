"""Options: every refusal at the public door, what a model says, prices while decoding, room."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from support.engine_matrix import (
    CHEAP,
    SAMPLED,
    build,
    cheap_rules,
    module_for,
    priced_rules,
    random_prompts,
    settings,
)
from support.merged_models import fresh_model
from support.tiny_models import tiny_model
from umim_core import UMIM
from umim_core.backbone.backbone import wrap_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import GenerationError, UmimError
from umim_core.inference.engine import Engine
from umim_core.inference.options import DEFAULT_TOP_K, GenerateOptions
from umim_core.inference.outputs import Row
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher

TEXT = "w1 w2 w9 w3 w4 w5"


def config(**settings: object) -> GenerationConfig:
    """A configuration that transformers' own constructor would not let pass."""
    made = GenerationConfig(max_new_tokens=2)
    for name, value in settings.items():
        setattr(made, name, value)
    return made


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 0}, "out of range; got .max_new_tokens. must be greater than 0"),
    ({"max_new_tokens": True}, "max_new_tokens must be an integer; got True"),
    ({"config": config(max_new_tokens="2")}, "max_new_tokens must be an integer; got 2"),
    ({"config": {"max_new_tokens": 3}}, "a GenerationConfig; got {.max_new_tokens"),
    ({"config": config(), "generation_config": config()}, "once; got .*generation_config.*config"),
    ({"config": config(num_beams=2, diversity_penalty=1.0)}, "diversity_penalty"),
    ({"config": config(max_length=20)}, "max_length"),
    ({"config": config(do_sample=True, top_p=1.5)}, "top_p is out of range"),
    ({"num_beams": 2}, "beam search is not supported; got num_beams"),
    ({"n": "2"}, "n must be an integer; got 2"),
    ({"n": 2}, "need sampling; got n .num_return_sequences. 2. Add do_sample, or ask for one"),
    ({"n": 0, "do_sample": True}, "num_return_sequences must be 1"),
    ({"n": 2, "num_return_sequences": 2}, "must be given once"),
    ({"temperature": 0.5}, r"need do_sample; got \['temperature'\]"),
    ({"top_k": 3, "min_p": 0.1, "do_sample": False}, r"got \['top_k', 'min_p'\]"),
    ({"seed": 1, "streams": [3], "do_sample": False}, r"got \['seed', 'streams'\]"),
    *(
        ({"do_sample": True, "n": 2, "max_new_tokens": 2, "streams": streams}, message)
        for message, several in (
            ("one per row; got", ([], [1], [1, 2, 3])),
            (
                r"^streams(\.\d must be (an int|at le)| must be a list)",
                ([1, -1], [1, 2.0], [0, True], "12", 5, {1, 2}, [None]),
            ),
        )
        for streams in several
    ),
    ({"temperature": -1.0, "do_sample": True}, "out of range"),
    ({"repetition_penalty": 10**400}, "repetition_penalty is out of range: int too large"),
    ({"min_p": "0.9", "do_sample": True}, "sampling setting min_p is out of range: .* got .0.9."),
    ({"do_sample": "model"}, "do_sample must be true or false; got model"),
    ({"stop_strings": 5}, r"without lone surrogates; got \[5\]"),
    ({"stop_strings": [""]}, "at least one character"),
    ({"eos_token_id": "w1"}, "one id or several; got w1"),
    ({"eos_token_id": [1.5]}, r"one id or several; got \[1\.5\]"),
    ({"seed": -1}, "seed must be at least 0; got -1"),
    ({"merge": "some"}, "merge must be one of"),
    ({"raw_tail": -1}, "raw_tail must be an integer of at least 0; got -1"),
    ({"raw_tail": 3, "merge": "none"}, "raw_tail needs a prompt that is merged"),
    ({"decode_max_damage": math.nan}, "decode_max_damage must be a number; got nan"),
    ({"decode_max_damage": 0.2, "merge": "prompt"}, "needs merging .* got merge 'prompt'. Merge"),
    ({"decode_max_damage": 0.2}, r"rules without prices\. Measure them: umim prune"),
    ({"span_eviction": -1, "merge": "none"}, "span_eviction must be .* 0; got -1"),
    ({"span_eviction": 2, "merge": "all"}, "reads prompt and generated tokens raw; got merge"),
    ({"logprobs": -1}, "logprobs must be .* 0; got -1"),
    ({"logprobs": 99}, "logprobs must lie between 0 and"),
    ({"logits_processor": print}, "logits_processor must be a list"),
    ({"stopping_criteria": print}, "stopping_criteria must be a list"),
    ({"observer": 5}, "observer must be callable; got 5"),
    ({"past": "state"}, "past must be a state or a prefix; got str"),
    ({"options": {"seed": 1}}, "options must be a GenerateOptions; got dict"),
    ({"max_tokens": 3}, "unknown option 'max_tokens'; known are .*max_new_tokens"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_an_option_that_cannot_be_honoured_is_refused(
    tiny_umim: UMIM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((UmimError, TypeError), match=message):
        tiny_umim.generate(TEXT, **options)


def test_streams_are_any_sequence_of_numbers(tiny_umim: UMIM) -> None:
    sampled = {"do_sample": True, "seed": 1, "n": 3, "max_new_tokens": 3}
    pair = namedtuple("pair", "a b c")(0, 1, 2)
    expected = tiny_umim.generate(TEXT, streams=[0, 1, 2], **sampled)
    for streams in (range(3), (0, 1, 2), pair):
        assert tiny_umim.generate(TEXT, streams=streams, **sampled) == expected


def test_a_stream_takes_one_row(tiny_umim: UMIM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(tiny_umim.stream(TEXT, max_new_tokens=2))  # no piece is empty
    monkeypatch.setattr(tiny_umim, "engine", None)  # refused before the first forward
    for prompts, options in (([TEXT, TEXT], {}), (TEXT, {"n": 2, "do_sample": True})):
        with pytest.raises(UmimError, match="a stream is of one row; got 2 rows"):
            next(tiny_umim.stream(prompts, max_new_tokens=2, **options))


def test_options_are_one_value_that_names_change(tiny_umim: UMIM) -> None:
    options = GenerateOptions(max_new_tokens=5, merge="none", eos_token_id=np.array([1, 2]))
    out = tiny_umim.generate(TEXT, options)
    assert out == tiny_umim.generate(TEXT, max_new_tokens=5, merge="none", eos_token_id=[1, 2])
    assert tiny_umim.generate(TEXT, options, merge="all").merge == "all"
    longer = tiny_umim.generate(TEXT, config=config(max_new_tokens=9), max_new_tokens=5, top_k=None)
    assert len(longer.ids[0]) == 5 and longer.options.settings.top_k == 0


@pytest.fixture
def umim(tiny_tokenizer: PreTrainedTokenizerFast) -> Iterator[UMIM]:
    """Without rules; its generation_config may be changed; torch's generator is kept."""
    backbone = wrap_backbone(tiny_model(), tiny_tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield UMIM(backbone, Checkpoint.of(fresh_model(backbone, [])))


def test_greedy_calls_leave_torchs_generator_alone(umim: UMIM) -> None:
    before = torch.get_rng_state()
    umim.generate(TEXT, max_new_tokens=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_word_stands_for_the_models_own_only_where_it_is_the_default() -> None:
    given = GenerateOptions(stop_strings="model", top_k="model", eos_token_id="model").settings
    assert (given.stop_strings, given.top_k, given.eos_token_id) == (["model"], None, None)


OWN = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 9, "eos_token_id": 0}
FILLED = [  # the model's own settings, what a caller gives, and what counts then
    (OWN, {}, {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": DEFAULT_TOP_K}),
    (OWN, {}, {"max_new_tokens": 64, "max_length": None}),
    ({"max_new_tokens": 7}, {}, {"max_new_tokens": 7}),
    (OWN, {"do_sample": False}, {"do_sample": False}),
    (OWN, {"temperature": 0.3}, {"temperature": 0.3}),
    ({}, {"do_sample": True}, {"top_k": DEFAULT_TOP_K}),
    *(({}, {"do_sample": True, "top_k": given}, {"top_k": 0}) for given in (0, None)),
    ({}, {"do_sample": True, "top_k": 3}, {"top_k": 3}),
]


@pytest.mark.parametrize(("own", "options", "expected"), FILLED)
def test_settings_are_filled_as_transformers_fills_them(
    umim: UMIM, own: dict[str, Any], options: dict[str, Any], expected: dict[str, Any]
) -> None:
    umim.backbone.model.generation_config = GenerationConfig(**own)
    found = GenerateOptions(**options).of_model(umim.backbone).config
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("own", "options", "instead"),
    [
        ({"num_beams": 4}, {}, {"config": GenerationConfig(num_beams=1)}),
        ({"do_sample": True, "num_return_sequences": 2}, {"do_sample": False}, {"n": 1}),
        ({"repetition_penalty": -1.0}, {}, {"repetition_penalty": 1.0}),
    ],
)
def test_what_a_models_file_asks_for_in_vain_is_refused_until_it_is_overridden(
    umim: UMIM, own: dict[str, Any], options: dict[str, Any], instead: dict[str, Any]
) -> None:
    umim.backbone.model.generation_config = GenerationConfig(**own, eos_token_id=0)
    with pytest.raises(GenerationError, match=rf"{list(own)[-1]}.*own generation_config\.json"):
        umim.generate(TEXT, max_new_tokens=3, **options)
    assert umim.generate(TEXT, max_new_tokens=3, **options, **instead).ids[0]


def test_an_end_token_may_be_given(umim: UMIM) -> None:
    free = umim.generate(TEXT, max_new_tokens=12, eos_token_id=None).ids[0]
    assert len(free) == 12
    for ends in (free[4], [99, free[4]]):
        output = umim.generate(TEXT, max_new_tokens=12, eos_token_id=ends)
        assert output.ids[0] == free[: free.index(free[4]) + 1]
        assert output.stop_reasons == ("eos",)


SAMPLING = settings(**SAMPLED, seed=0)


def model(matcher: Matcher, bound: float | None = None) -> MergedModel:
    backbone = build("llama")
    return MergedModel(backbone, module_for(backbone), matcher, decode_max_damage=bound)


def rows_of(merged_model: MergedModel, **options: object) -> tuple[Row, ...]:
    chosen = replace(SAMPLING, **options)
    return Engine(merged_model).generate(random_prompts(5, 4), chosen).rows


@pytest.mark.parametrize("infix_free", [True, False])
def test_generated_tokens_merge_by_the_rules_under_a_bound(infix_free: bool) -> None:
    """That of a request, else that of the model; prompts merge by all rules."""
    matcher = priced_rules(3, infix_free)
    whole, bounded = model(matcher), model(matcher, CHEAP)
    every, prompt = rows_of(whole), rows_of(whole, merge="prompt")
    cheap = rows_of(whole, decode_max_damage=CHEAP)
    assert every != cheap != prompt != every
    assert rows_of(whole, decode_max_damage=-math.inf) == prompt
    assert rows_of(bounded) == cheap
    assert rows_of(bounded, decode_max_damage=math.inf) == every
    assert rows_of(bounded, merge="prompt") == prompt
    cut = model(cheap_rules(matcher))
    assert rows_of(whole, decode_max_damage=CHEAP, raw_tail=99) == rows_of(cut, raw_tail=99)
    engine, prompts = Engine(whole), random_prompts(5, 4)  # bounds of several requests do not mix
    for bound, rows in ((CHEAP, cheap), (-1.0, prompt), (CHEAP, cheap)):
        options = replace(SAMPLING, decode_max_damage=bound)
        assert engine.generate(prompts, options).rows == rows
