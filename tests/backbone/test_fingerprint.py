"""Fingerprints: equal for what is the same model or tokenizer, different for all else.

Hashes of weights are kept between loads, and never trusted when something changed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from support.tiny_models import tiny_config, tiny_model, word_tokenizer
from umim_core.backbone import model_identity as identities
from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.backbone.model_identity import model_identity
from umim_core.backbone.tokenizer_files import load_tokenizer, special_ids, tokenizer_fingerprint


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_one_changed_weight_changes_the_fingerprint(name: str) -> None:
    want = model_identity(tiny_model(name)).fingerprint
    assert model_identity(tiny_model(name)).fingerprint == want
    names = [key for key, _ in tiny_model(name).named_parameters()]
    assert len(names) > 10
    for key in names:
        model = tiny_model(name)
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


def test_tokenizers_of_one_size_with_other_vocabularies_or_pieces_differ() -> None:
    one, same = word_tokenizer(WORDS), word_tokenizer(WORDS)
    other, renamed = word_tokenizer(WORDS[::-1]), word_tokenizer([*WORDS[:3], "x"])
    state = json.loads(one.backend_tokenizer.to_str())
    state["pre_tokenizer"] = {"type": "Whitespace"}
    split = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token="<eos>"
    )
    assert len(one) == len(other) == len(renamed)
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(same)
    assert len({tokenizer_fingerprint(t) for t in (one, other, renamed, split)}) == 4


def test_padding_truncation_and_use_leave_the_fingerprint_alone(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(WORDS)
    want = tokenizer_fingerprint(tokenizer)
    tokenizer(["cat", "dog owl"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(tokenizer) == want
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_fingerprint(load_tokenizer(str(tmp_path))) == want
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert tokenizer_fingerprint(tokenizer, without="<pad>") == want
    assert tokenizer_fingerprint(tokenizer) != want


def test_added_tokens_flagged_special_are_special_without_a_role() -> None:
    tokenizer = word_tokenizer(WORDS)
    tokenizer.add_tokens([AddedToken("<|eot_id|>", special=True), AddedToken("plain")])
    marks = tokenizer.convert_tokens_to_ids(["<eos>", "<|eot_id|>"])
    assert tokenizer.convert_tokens_to_ids("<|eot_id|>") not in tokenizer.all_special_ids
    assert special_ids(tokenizer) == set(marks)


@pytest.fixture
def saved(tiny_llama: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A backbone that counts as large, with a cache of its own."""
    folder = tmp_path / "model"
    tiny_llama.model.save_pretrained(folder)
    tiny_llama.tokenizer.save_pretrained(folder)
    monkeypatch.setattr(identities, "_SMALLEST", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Data types of the models whose weights were hashed."""
    counted: list[torch.dtype] = []
    lines = identities.weight_lines

    def count(model: torch.nn.Module) -> tuple[str, ...]:
        counted.append(next(model.parameters()).dtype)
        return lines(model)

    monkeypatch.setattr(identities, "weight_lines", count)
    return counted


def records(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache" / "umim" / "weights").iterdir())


def test_weights_are_hashed_once_whatever_the_data_type(
    saved: Path, hashed: list[torch.dtype], tmp_path: Path
) -> None:
    found = {
        load_backbone(str(saved), dtype=dtype).fingerprint
        for dtype in ("float16", "float32", "bfloat16")
    }
    assert len(found) == 1
    assert hashed == [torch.float32]  # as published: float16 would not hold the weights
    assert len(records(tmp_path)) == 1


def test_changed_weights_and_damaged_records_are_hashed_again(
    saved: Path, hashed: list[torch.dtype], tmp_path: Path
) -> None:
    before = load_backbone(str(saved)).fingerprint
    [record] = records(tmp_path)
    for count, damage in enumerate(["", "[]", "{", '["x"]', "null"], start=2):
        record.write_text(damage)
        for _ in range(2):
            assert load_backbone(str(saved)).fingerprint == before
            assert len(hashed) == count
    path = saved / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"][0, 0] += 1.0
    save_file(weights, path, metadata={"format": "pt"})
    os.utime(path, ns=(1, 1))
    assert load_backbone(str(saved)).fingerprint != before
    assert len(hashed) == 7
