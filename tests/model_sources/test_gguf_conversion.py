"""GGUF files become directories that hold the same model, once per content, and are written."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from support.gguf_files import TEMPLATE, tiny_bpe, tiny_llama, write_gguf
from support.tiny_models import random_model, tiny_config
from umim_core.backbone.backbone import load_backbone
from umim_core.backbone.tokenizer_files import backbone_identity, load_tokenizer, quantisation_note
from umim_core.errors import BackboneError
from umim_core.model_sources import gguf_writing
from umim_core.model_sources.gguf_conversion import convert_gguf
from umim_core.model_sources.gguf_file import read_gguf
from umim_core.model_sources.model_cache import gguf_directory
from umim_core.store.artifacts import directory_digest

PIPELINE = tiny_bpe()
VOCAB = len(PIPELINE["model"]["vocab"]) + 3  # rows beyond the tokens, as published models have
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "tie_word_embeddings": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Settings that differ from every default, and for each family what is its own.
OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-untied": {"tie_word_embeddings": False},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "phi3": {"tie_word_embeddings": False},
}


def tiny_model(family: str = "llama", **changes: Any) -> PreTrainedModel:
    settings = SIZES | OWN.get(family, {}) | changes
    model = random_model(tiny_config(family.split("-")[0], **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms start at 1 and biases at 0
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    return model.eval()


def converted(tmp_path: Path, model: PreTrainedModel | None = None, **options: Any) -> Path:
    source = write_gguf(tmp_path / "m.gguf", model or tiny_model(), PIPELINE, **options)
    out = tmp_path / "out"
    out.mkdir()
    convert_gguf(source, out)
    return out


@pytest.mark.parametrize("family", OWN)
def test_a_family_computes_what_the_model_in_the_file_does(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    backbone = load_backbone(str(converted(tmp_path, model)))  # and has every capability
    ids = torch.arange(3, 40)[None]
    assert torch.equal(backbone.model(ids).logits, model(ids).logits)
    wanted = model.state_dict()
    assert all(torch.equal(v, wanted[k]) for k, v in backbone.model.state_dict().items())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16"])
def test_weights_are_those_that_transformers_dequantises(kind: str, tmp_path: Path) -> None:
    out = converted(tmp_path, kind=kind)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, trust_remote_code=False
    )
    state = theirs.state_dict()
    ours = load_file(out / "model.safetensors")
    assert {name for name in state if name != "lm_head.weight"} == set(ours)
    assert all(torch.equal(state[name], tensor) for name, tensor in ours.items())
    assert not torch.equal(state["model.norm.weight"], torch.ones(32))


def test_llama_3_scaling_is_read_from_its_divisors(tmp_path: Path) -> None:
    model = tiny_model(rope_parameters=LLAMA3, head_dim=32, max_position_embeddings=4096)
    divisors = (1 / model.model.rotary_emb.inv_freq) / (500000.0 ** (torch.arange(0, 32, 2) / 32))
    out = converted(tmp_path, model, tensors={"rope_freqs.weight": divisors.numpy()})
    found = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=False)
    assert found.config.rope_parameters == model.config.rope_parameters
    ids = torch.arange(3, 40)[None]
    assert torch.equal(found(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"entries": {"general.architecture": "falcon"}}, "llama, qwen2, qwen3, phi3; got"),
        ({"entries": {"split.count": 2}}, "one of 2 parts"),
        ({"entries": {"llama.expert_count": 8}}, "llama.expert_count"),
        ({"entries": {"llama.attention.clamp_kqv": 1.0}}, "llama.attention.clamp_kqv"),
        ({"entries": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type"),
        ({"entries": {"llama.rope.dimension_count": 4}}, "4 for heads of 8"),
        ({"entries": {"llama.attention.key_length": 7}}, "must be of an even size"),
        *(
            ({"entries": {f"llama.{key}": value}}, f"llama.{key} of a GGUF file must be a size")
            for key in (
                *("attention.key_length", "context_length", "block_count", "embedding_length"),
                *("attention.head_count", "attention.head_count_kv", "feed_forward_length"),
            )
            for value in (0, 1 << 31)
        ),
        *(
            ({"entries": {f"llama.{key}": value}}, "must be finite and above zero")
            for key in ("rope.freq_base", "attention.layer_norm_rms_epsilon")
            for value in (0.0, -1.0, float("nan"), float("inf"))
        ),
        ({"entries": {"llama.attention.head_count_kv": 3}}, "they by the heads of keys; got 32, 4"),
        ({"entries": {"llama.block_count": 3}}, "lacks blk.2.attn_norm.weight"),
        ({"entries": {"llama.block_count": 1}}, "the tensor blk.1"),
        ({"entries": {"llama.block_count": None}}, "lacks llama.block_count"),
        ({"entries": {"llama.block_count": "2"}}, "must be one whole number"),
        ({"entries": {"llama.embedding_length": 64}}, "must have the sizes"),
        ({"entries": {"tokenizer.ggml.model": "llama"}}, "byte-level BPE"),
        ({"entries": {"tokenizer.ggml.pre": "smolm"}}, "Did you mean 'smollm'?"),
        ({"entries": {"tokenizer.ggml.pre": None}}, "lacks tokenizer.ggml.pre"),
        ({"entries": {"tokenizer.ggml.eos_token_id": 999}}, "must be below"),
        ({"entries": {"tokenizer.ggml.merges": ["a"]}}, "join two tokens"),
        ({"tensors": {"blk.0.attn_q.bias": np.ones(32, np.float32)}}, "blk.0.attn_q.bias"),
        ({"tensors": {"rope_freqs.weight": np.full(4, 3.0, np.float32)}}, "rope_freqs.weight"),
        ({"tensors": {"output_norm.weight": np.full(32, np.nan, np.float32)}}, "has NaN"),
    ],
)
def test_what_cannot_be_converted_exactly_is_named(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(BackboneError) as error:
        converted(tmp_path, **options)
    assert said in str(error.value)


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", tiny_model(), PIPELINE, kind="Q8_0").read_bytes()
    part = tmp_path / "part.gguf"
    for end in [*range(0, 200), *range(200, len(whole) - 64, 997), len(whole) - 64]:
        part.write_bytes(whole[:end])
        with pytest.raises(BackboneError):
            read_gguf(part)


def test_a_damaged_header_is_refused_or_still_a_model(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", tiny_model(), PIPELINE, kind="Q8_0").read_bytes()
    part, out, chance, refused = tmp_path / "part.gguf", tmp_path / "out", random.Random(5), 0
    out.mkdir()
    for _ in range(150):
        damaged = bytearray(whole)
        for at in chance.sample(range(12_000), 3):
            damaged[at] = chance.randrange(256)
        part.write_bytes(damaged)
        try:
            convert_gguf(part, out)
        except BackboneError:
            refused += 1
    assert refused > 50


@pytest.mark.timeout(60)
def test_a_header_of_millions_of_values_is_refused_at_once(tmp_path: Path) -> None:
    count = 8_000_000
    key = b"tokenizer.ggml.tokens"
    head = struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + struct.pack("<IIQ", 9, 8, count)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + head + bytes(8 * count))
    begin = time.process_time()
    with pytest.raises(BackboneError, match="its header has over 4,194,304 values"):
        read_gguf(path)
    assert time.process_time() - begin < 10


def directory(folder: Path, family: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> Path:
    """A directory of a random model and its tokenizer."""
    tiny_model(family, **sizes).to(dtype).save_pretrained(folder)
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
    gguf_writing.write_gguf(source, tmp_path / "model.gguf", "Tiny")
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
    assert len(file.texts("tokenizer.ggml.tokens")) == VOCAB
    assert file.text("tokenizer.chat_template") == TEMPLATE
    assert file.text("general.name") == "Tiny"


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
        gguf_writing.write_gguf(source, tmp_path / "model.gguf", "Tiny")


def test_a_tokenizer_that_splits_otherwise_is_refused(tmp_path: Path) -> None:
    source = directory(tmp_path / "model", "llama")
    pipeline = json.loads((source / "tokenizer.json").read_text())
    pipeline["pre_tokenizer"] = {"type": "Whitespace"}
    (source / "tokenizer.json").write_text(json.dumps(pipeline))
    with pytest.raises(BackboneError, match="of tokenizers that split as"):
        gguf_writing.write_gguf(source, tmp_path / "model.gguf", "Tiny")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UMIM_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "records"))
    return tmp_path / "models"


def make(path: Path, seed: int = 0) -> Path:
    return write_gguf(path, tiny_llama(PIPELINE, seed), PIPELINE, kind="Q8_0")


@pytest.fixture
def file(tmp_path: Path, cache: Path) -> Path:
    return make(tmp_path / "own.gguf")


def conversions(caplog: pytest.LogCaptureFixture) -> int:
    return sum("converting" in record.getMessage() for record in caplog.records)


def test_a_backbone_may_be_a_gguf_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    backbone = load_backbone("own.gguf")
    assert backbone.name == "own.gguf"
    assert backbone.decode(backbone.encode("the cat 24")) == "the cat 24"
    other = load_backbone(str(gguf_directory(file)))
    assert backbone.fingerprint == other.fingerprint
    assert torch.equal(backbone.embedding_weight, other.embedding_weight)
    assert backbone_identity("own.gguf", None) == backbone_identity(other.name, None)
    assert "own.gguf was quantised (Q8_0 " in quantisation_note("own.gguf")
    assert quantisation_note("umim-docs-llama") == ""


def test_a_file_of_the_models_folder_is_found_by_its_name(file: Path, cache: Path) -> None:
    with pytest.raises(BackboneError, match=rf"Put it into {cache}, or name its path"):
        load_tokenizer("own.gguf")
    cache.mkdir(exist_ok=True)
    file.rename(cache / "own.gguf")
    assert backbone_identity("own.gguf", None) == backbone_identity(str(cache / "own.gguf"), None)
    with pytest.raises(BackboneError):  # another folder was meant
        load_tokenizer("elsewhere/own.gguf")


def test_a_file_is_converted_once_under_any_name(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_tokenizer(str(file))
    load_backbone(str(file))
    for name in ("copy.gguf", os.fsdecode(b"\xff.gguf")):  # whatever its encoding is
        shutil.copy(file, tmp_path / name)
        assert gguf_directory(tmp_path / name) == gguf_directory(file)
    assert conversions(caplog) == 1


def test_a_file_that_changes_while_it_is_converted_is_refused(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(path: Path, out: Path) -> None:
        convert_gguf(path, out)
        before = path.stat()
        make(path, seed=1)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    monkeypatch.setattr("umim_core.model_sources.model_cache.convert_gguf", convert)
    with pytest.raises(BackboneError, match="must stay as it is while it is converted"):
        gguf_directory(file)
    assert [*cache.glob("gguf-*/")] == []


def test_a_damaged_conversion_is_made_again(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = gguf_directory(file)
    before = directory_digest(directory)
    (directory / "model.safetensors").write_bytes(b"torn")
    assert directory_digest(gguf_directory(file)) == before
    assert conversions(caplog) == 2
    assert " is built again: " in caplog.text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent.gguf", "a file that does not exist. Put it into "),
        ("folder", "a folder of 2 GGUF files. Name the file: folder/a.gguf, folder/b.gguf"),
        ("text.txt", "a file. Name a .gguf file or a model's directory"),
        ("no.gguf", "must start with the letters GGUF"),
    ],
)
def test_what_is_no_model_is_named(
    name: str, said: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for part in ("folder/a.gguf", "folder/b.gguf", "text.txt", "no.gguf"):
        (tmp_path / part).write_text("no model")
    for load in (load_tokenizer, load_backbone):
        with pytest.raises(BackboneError) as error:
            load(name)
        assert said in str(error.value)
    assert not cache.exists() or not [*cache.glob("gguf-*")]
