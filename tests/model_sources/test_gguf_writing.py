"""GGUF files that are written hold what llama.cpp expects, and come back as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from support.gguf_files import LLAMA3, TEMPLATE, tiny_bpe
from support.gguf_files import write_gguf as written_by_tests
from support.tiny_models import random_model, tiny_config
from umim_core.errors import BackboneError
from umim_core.model_sources.gguf_conversion import convert_gguf
from umim_core.model_sources.gguf_file import read_gguf
from umim_core.model_sources.gguf_writing import write_gguf

PIPELINE = tiny_bpe()
TOKENS = len(PIPELINE["model"]["vocab"])
ROWS = TOKENS + 5  # as many more as spans have


def directory(folder: Path, family: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> Path:
    """A directory of a random model and its tokenizer."""
    config = tiny_config(family, vocab_size=ROWS, hidden_size=32, intermediate_size=64, **sizes)
    random_model(config).to(dtype).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(PIPELINE)),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "dtype", "sizes"),
    [
        ("llama", torch.float32, {}),
        ("llama", torch.float16, {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
        ("qwen2", torch.bfloat16, {"tie_word_embeddings": True}),
        ("qwen3", torch.float32, {}),
        ("phi3", torch.float32, {}),
        (
            "llama",
            torch.float32,
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        ),
    ],
    ids=["llama", "llama3", "qwen2", "qwen3", "phi3", "linear"],
)
def test_a_file_comes_back_as_the_directory(
    tmp_path: Path, family: str, dtype: torch.dtype, sizes: dict[str, Any]
) -> None:
    source = directory(tmp_path / "model", family, dtype, **sizes)
    write_gguf(source, tmp_path / "model.gguf", "Tiny")
    convert_gguf(tmp_path / "model.gguf", tmp_path / "back")
    weights, back = (
        load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back")
    )
    if sizes.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name].float()) for name in weights)
    file = read_gguf(tmp_path / "model.gguf")
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    assert kinds == {{"float32": "F32", "float16": "F16"}.get(str(dtype)[6:], "BF16")}
    assert len(file.texts("tokenizer.ggml.tokens")) == ROWS
    assert file.text("tokenizer.chat_template") == TEMPLATE
    assert file.text("general.name") == "Tiny"


def test_rotary_rows_stand_as_llama_cpp_wants_them(tmp_path: Path) -> None:
    source = directory(tmp_path / "model", "llama", num_attention_heads=4, num_key_value_heads=2)
    write_gguf(source, tmp_path / "ours.gguf", "Tiny")
    config = tiny_config("llama", vocab_size=ROWS, hidden_size=32, intermediate_size=64)
    theirs = written_by_tests(tmp_path / "theirs.gguf", random_model(config), PIPELINE)
    ours = read_gguf(tmp_path / "ours.gguf")
    wanted = read_gguf(theirs)
    assert ours.tensors.keys() == wanted.tensors.keys()
    for name, tensor in wanted.tensors.items():
        assert (ours.tensors[name].values() == tensor.values()).all(), name
    shared = set(wanted.metadata) - {"tokenizer.ggml.tokens", "tokenizer.ggml.token_type"}
    same = {key for key in shared if ours.metadata.get(key) == wanted.metadata[key]}
    assert shared - same <= {
        "tokenizer.ggml.padding_token_id",
        "tokenizer.ggml.unknown_token_id",
        "GGUF.version",
    }


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        ("gpt2", {}, "is written of the architectures"),
        ("mistral", {}, "is written of the architectures"),
        ("llama", {"attention_bias": True}, "attention_bias must be False"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ("phi3", {"sliding_window": 8}, "is written of full attention"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_parameters must be",
        ),
    ],
)
def test_models_that_a_file_does_not_hold_exactly_are_refused(
    tmp_path: Path, family: str, sizes: dict[str, Any], message: str
) -> None:
    source = directory(tmp_path / "model", family, **sizes)
    with pytest.raises(BackboneError, match=message):
        write_gguf(source, tmp_path / "model.gguf", "Tiny")


def test_a_tokenizer_that_splits_otherwise_is_refused(tmp_path: Path) -> None:
    source = directory(tmp_path / "model", "llama")
    pipeline = json.loads((source / "tokenizer.json").read_text())
    pipeline["pre_tokenizer"] = {"type": "Whitespace"}
    (source / "tokenizer.json").write_text(json.dumps(pipeline))
    with pytest.raises(BackboneError, match="of tokenizers that split as"):
        write_gguf(source, tmp_path / "model.gguf", "Tiny")
