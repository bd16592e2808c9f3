"""Fingerprints: equal for what is the same model or tokenizer, different for all else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from support.tiny_models import tiny_config
from umim_core.backbone.fingerprint import (
    special_ids,
    tokenizer_fingerprint,
)
from umim_core.backbone.model_identity import model_identity
from umim_core.backbone.tokenizer_files import load_tokenizer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_fingerprint_does_not_depend_on_the_type_it_was_loaded_in(
    tiny_model: Callable[[str, int], PreTrainedModel], name: str, dtype: torch.dtype
) -> None:
    want = model_identity(tiny_model(name, 0).to(torch.bfloat16)).fingerprint
    assert model_identity(tiny_model(name, 0).to(torch.bfloat16).float()).fingerprint == want
    assert model_identity(tiny_model(name, 0).to(torch.bfloat16).to(dtype)).fingerprint == want


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_one_changed_weight_changes_the_fingerprint(
    tiny_model: Callable[[str, int], PreTrainedModel], name: str
) -> None:
    want = model_identity(tiny_model(name, 0)).fingerprint
    assert model_identity(tiny_model(name, 0)).fingerprint == want
    names = [key for key, _ in tiny_model(name, 0).named_parameters()]
    assert len(names) > 10
    for key in names:
        model = tiny_model(name, 0)
        with torch.no_grad():
            flat = model.get_parameter(key).view(-1)
            flat[flat.numel() // 2] += 0.1
        assert model_identity(model).fingerprint != want, key


def test_a_field_counts_where_the_code_that_may_read_it_is_not_known() -> None:
    config = tiny_config(my_note="hello")
    known = LlamaForCausalLM(config)
    unknown = type("Mine", (LlamaForCausalLM,), {"__module__": "builtins"})(config)
    assert "my_note" in model_identity(known).neutral
    assert "my_note" not in model_identity(unknown).neutral


WORDS = ["<eos>", "cat", "dog", "owl"]


def test_tokenizers_of_one_size_with_other_vocabularies_differ(
    word_tokenizer: Callable[[list[str]], PreTrainedTokenizerFast],
) -> None:
    one, same = word_tokenizer(WORDS), word_tokenizer(WORDS)
    other, renamed = (
        word_tokenizer(["<eos>", "dog", "cat", "owl"]),
        word_tokenizer([*WORDS[:3], "x"]),
    )
    assert len(one) == len(other) == len(renamed)
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(same)
    assert len({tokenizer_fingerprint(t) for t in (one, other, renamed)}) == 3


def test_padding_truncation_and_use_leave_the_fingerprint_alone(
    word_tokenizer: Callable[[list[str]], PreTrainedTokenizerFast], tmp_path: Path
) -> None:
    tokenizer = word_tokenizer(WORDS)
    want = tokenizer_fingerprint(tokenizer)
    tokenizer(["cat", "dog owl"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(tokenizer) == want
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_fingerprint(load_tokenizer(str(tmp_path))) == want


def test_another_way_of_splitting_changes_the_fingerprint(
    word_tokenizer: Callable[[list[str]], PreTrainedTokenizerFast],
) -> None:
    state = json.loads(word_tokenizer(WORDS).backend_tokenizer.to_str())
    state["pre_tokenizer"] = {"type": "Whitespace"}
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token="<eos>"
    )
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(word_tokenizer(WORDS))


def test_added_tokens_flagged_special_are_special_without_a_role(
    word_tokenizer: Callable[[list[str]], PreTrainedTokenizerFast],
) -> None:
    tokenizer = word_tokenizer(WORDS)
    tokenizer.add_tokens([AddedToken("<|eot_id|>", special=True), AddedToken("plain")])
    marks = tokenizer.convert_tokens_to_ids(["<eos>", "<|eot_id|>"])
    assert tokenizer.convert_tokens_to_ids("<|eot_id|>") not in tokenizer.all_special_ids
    assert special_ids(tokenizer) == set(marks)
