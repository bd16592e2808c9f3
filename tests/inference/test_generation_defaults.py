"""Defaults of ``UMIM.generate``, and transformers' names of its options."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from support.merged_models import fresh_model
from umim_core import UMIM
from umim_core.backbone.backbone import wrap_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.errors import GenerationError
from umim_core.inference.options import DEFAULT_TOP_K, GenerateOptions

PROMPT = "w1 w2 w3 w4 w5"
IDS = [1, 2, 3, 4, 5]


@pytest.fixture
def umim(
    tiny_model: Callable[[str, int], PreTrainedModel], tiny_tokenizer: PreTrainedTokenizerFast
) -> Iterator[UMIM]:
    """Without rules; its generation_config may be changed; torch's generator is kept."""
    backbone = wrap_backbone(tiny_model("llama", 0), tiny_tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield UMIM(backbone, Checkpoint.of(fresh_model(backbone, [])))


def theirs(umim: UMIM, **options: object) -> list[int]:
    out = umim.backbone.model.generate(
        torch.tensor([IDS]),
        attention_mask=torch.ones(1, len(IDS), dtype=torch.int64),
        max_new_tokens=12,
        pad_token_id=0,
        **options,
    )
    return out[0, len(IDS) :].tolist()


def settings(umim: UMIM, **options: object) -> GenerationConfig:
    config = GenerateOptions(**options).of_model(umim.backbone).config
    assert config is not None
    return config


def test_greedy_calls_leave_torchs_generator_alone(umim: UMIM) -> None:
    before = torch.get_rng_state()
    umim.generate(PROMPT, max_new_tokens=3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "own", [{"repetition_penalty": 1.9}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": [9, 20]}]
)
def test_what_is_not_given_is_the_models_own(umim: UMIM, own: dict[str, object]) -> None:
    plain = umim.generate(PROMPT, max_new_tokens=12).ids
    umim.backbone.model.generation_config = GenerationConfig(**own, eos_token_id=[30, 31])
    output = umim.generate(PROMPT, max_new_tokens=12)
    assert list(output.ids[0]) == theirs(umim) and output.ids != plain
    assert umim.generate(PROMPT, config=GenerationConfig(max_new_tokens=12)) == output


def test_what_is_given_overrides_the_models_own(umim: UMIM) -> None:
    umim.backbone.model.generation_config = GenerationConfig(repetition_penalty=1.9, eos_token_id=0)
    output = umim.generate(PROMPT, max_new_tokens=12, repetition_penalty=1.2)
    assert list(output.ids[0]) == theirs(umim, repetition_penalty=1.2) != theirs(umim)


def test_a_model_that_samples_samples_by_default(umim: UMIM) -> None:
    own = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, max_length=9, eos_token_id=0)
    umim.backbone.model.generation_config = own
    found = settings(umim)
    assert (found.do_sample, found.temperature, found.top_p, found.top_k) == (True, 0.6, 0.9, 50)
    assert (found.max_new_tokens, found.max_length) == (64, None)
    assert not settings(umim, do_sample=False).do_sample
    assert settings(umim, temperature=0.3).temperature == 0.3


def test_sampling_takes_transformers_top_k_unless_another_is_given(umim: UMIM) -> None:
    assert settings(umim, do_sample=True).top_k == DEFAULT_TOP_K
    for given in (0, None):
        assert settings(umim, do_sample=True, top_k=given).top_k == 0
    assert settings(umim, do_sample=True, top_k=3).top_k == 3


def test_a_model_whose_file_asks_for_beams_is_refused_until_they_are_overridden(umim: UMIM) -> None:
    umim.backbone.model.generation_config = GenerationConfig(num_beams=4, eos_token_id=0)
    with pytest.raises(GenerationError, match="num_beams"):
        umim.generate(PROMPT, max_new_tokens=3)
    assert umim.generate(PROMPT, config=GenerationConfig(num_beams=1, max_new_tokens=3)).ids[0]


def test_an_end_token_may_be_given(umim: UMIM) -> None:
    free = umim.generate(PROMPT, max_new_tokens=12, eos_token_id=None).ids[0]
    assert len(free) == 12
    for ends in (free[4], [99, free[4]]):
        output = umim.generate(PROMPT, max_new_tokens=12, eos_token_id=ends)
        assert output.ids[0] == free[: free.index(free[4]) + 1]
        assert output.stop_reasons == ("eos",)
