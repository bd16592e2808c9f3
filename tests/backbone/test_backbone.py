"""Backbones and tokenizers by name, from directories, in memory, from a hub; devices, shapes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    FalconConfig,
    MambaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from support import family_configs
from support.engine_matrix import settings
from support.merged_models import fresh_model
from support.tiny_models import random_model, tiny_config, tiny_model
from umim_core import UMIM
from umim_core.backbone.backbone import Backbone, load_backbone, wrap_backbone
from umim_core.backbone.devices import default_device, fastest_dtype, float64_device, has_device
from umim_core.backbone.shape import BackboneShape, local_shape, trained_context
from umim_core.backbone.tokenizer_files import (
    load_tokenizer,
    resolve_backbone,
    tokenizer_fingerprint,
)
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.embedded.assets import embedded_names
from umim_core.errors import (
    BackboneError,
    BackboneMismatchError,
    ConfigError,
    ContextLengthError,
)
from umim_core.inference.engine import Engine
from umim_core.merging.merged_model import MergedModel


def test_a_model_in_memory_may_name_its_revision_and_have_no_tokenizer() -> None:
    model = random_model(tiny_config())
    backbone = wrap_backbone(model, None, revision="r" * 40)
    assert (wrap_backbone(model, None).revision, backbone.revision) == (None, "r" * 40)
    assert (backbone.special_ids, backbone.tokenizer_fingerprint) == (frozenset(), "")
    with pytest.raises(BackboneError, match="text needs a tokenizer; got in-memory has none"):
        backbone.encode("w1")


def test_positions_end_where_a_longer_row_would_change_the_frequencies_of_others(
    tmp_path: Path,
) -> None:
    """LongRoPE, of Phi-3 and Phi-4-mini; the others choose theirs once."""
    rope = {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [1.0, 8.0]}
    config = tiny_config("phi3", rope_scaling=rope, original_max_position_embeddings=16)
    backbone = wrap_backbone(random_model(config), None)
    assert config.max_position_embeddings > backbone.max_positions == 16
    config.save_pretrained(tmp_path)
    assert trained_context(str(tmp_path)) == 16
    rule = r"must fit the backbone's 16 positions \(LongRoPE's first frequencies\); got 2 prompt"
    with pytest.raises(ContextLengthError, match=rule):
        Engine(MergedModel.without_merging(backbone)).generate([[1, 2]], settings(16))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_directory_loads_with_the_fingerprints_it_was_saved_with(
    tiny_llama: Backbone, tmp_path: Path, dtype: str
) -> None:
    tiny_llama.model.save_pretrained(tmp_path)
    tiny_llama.tokenizer.save_pretrained(tmp_path)
    back = load_backbone(str(tmp_path), dtype=dtype)
    assert back.fingerprint == tiny_llama.fingerprint
    assert back.tokenizer_fingerprint == tiny_llama.tokenizer_fingerprint
    assert str(back.dtype) == f"torch.{dtype}"
    assert back.encode("w3 w1 w31") == [3, 1, 31] and back.encode("") == []
    assert back.decode([3, 0, 1]) == "w3 w1"  # without special tokens


@pytest.mark.parametrize(
    "name", ["umim-docs-llama", pytest.param("umim-docs-gpt2", marks=pytest.mark.full)]
)
def test_threads_that_load_at_once_get_the_same_whole_model(name: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(load_backbone, [name] * 6))
    assert len({backbone.fingerprint for backbone in found}) == 1


@pytest.mark.parametrize("name", embedded_names())
def test_the_short_way_to_a_tokenizer_gives_what_transformers_gives(name: str) -> None:
    ours = load_tokenizer(name)
    theirs = AutoTokenizer.from_pretrained(resolve_backbone(name), trust_remote_code=False)
    assert type(ours) is type(theirs)
    assert tokenizer_fingerprint(ours) == tokenizer_fingerprint(theirs)
    assert ours("Return it.")["input_ids"] == theirs("Return it.")["input_ids"]


@pytest.mark.parametrize("load", [load_backbone, load_tokenizer])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./nowhere", "'./nowhere', a path that does not exist"),
        ("a/b/c", "a path that does not exist"),
        ("nosuch", "'nosuch', neither a directory nor downloaded before"),
        ("umim-docs-lama", "Did you mean 'umim-docs-llama'?"),
        (
            "umim-qwen-coder-0.5b",
            "a checkpoint. Name its model, qwen2.5-coder-0.5b-instruct-q4_k_m.gguf.",
        ),
        *(
            (name, "Name no address, user or password.")
            for name in (
                "https://user:PW@huggingface.co/a/b",
                "user:PW@host/x",
                "s3://KEY:PW@bucket/p",
                "https://hf.co/a/b?token=PW",
            )
        ),
    ],
)
def test_what_is_nowhere_is_told_at_once_and_by_what_it_looks_like(
    name: str, said: str, load: Callable[..., object]
) -> None:
    with pytest.raises(BackboneError) as caught:
        load(name, local_files_only=True)
    message = str(caught.value)
    assert said in message
    assert ("umim-docs-gpt2, umim-docs-llama" in message) == ("path" not in said)
    assert "PW" not in message


def test_a_hub_out_of_reach_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(address: tuple[str, int], _: float) -> None:
        asked.append(address)
        raise OSError("no route")

    monkeypatch.setattr("umim_core.backbone.tokenizer_files.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("umim_core.backbone.tokenizer_files.getproxies", dict)
    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(BackboneError, match="neither a directory nor downloaded before"):
        load_tokenizer("nosuch")
    assert [port for _, port in asked] == [443]


NAME = "owner/name"
FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture
def hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """A hub's cache, offline: a repository whose main branch has moved on to other weights."""
    repository = tmp_path / "models--owner--name"
    for seed, commit in enumerate((FIRST, SECOND)):
        tiny_model("llama", seed).save_pretrained(repository / "snapshots" / commit)
        tiny_tokenizer.save_pretrained(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(SECOND)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_a_checkpoint_loads_the_revision_it_was_trained_with(hub: None, tmp_path: Path) -> None:
    first, second = (load_backbone(NAME, revision=commit) for commit in (FIRST, SECOND))
    assert first.fingerprint != second.fingerprint == load_backbone(NAME).fingerprint
    made = Checkpoint.of(fresh_model(first, [(1, 2)]))
    made.save(tmp_path / "pinned")
    assert UMIM.from_pretrained(tmp_path / "pinned").backbone.fingerprint == first.fingerprint
    config = made.config.model_copy(update={"backbone_revision": None})
    replace(made, config=config).save(tmp_path / "branch")
    with pytest.raises(BackboneMismatchError, match=NAME):  # the branch moved on
        UMIM.from_pretrained(tmp_path / "branch")
    for load in (load_backbone, load_tokenizer):
        with pytest.raises(BackboneError, match=NAME):
            load(NAME, revision="c" * 40)


def test_devices_are_told_by_name_and_the_processor_is_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert default_device() == "cpu"
    assert not any(map(has_device, ["cudaa", "cuda:99", "cpu:7", "meta", ""]))
    for name, place in (("cpu", "cpu"), ("cuda:1", "cuda:1"), ("mps", "cpu")):  # has no float64
        assert float64_device(torch.device(name)) == torch.device(place)


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cudaa"])
def test_a_backbone_on_a_device_that_is_not_there_is_refused_before_it_is_looked_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    message = rf"^device must be cpu: there is no usable GPU; got {name}\. Choose"
    with pytest.raises(ConfigError, match=message):
        load_backbone("no-such-backbone", device=name)


@pytest.mark.parametrize(
    ("flags", "supported", "fastest"),
    [
        ({"avx512f", "avx512_bf16"}, True, "bfloat16"),
        ({"amx_bf16"}, True, "bfloat16"),
        ({"asimd", "bf16"}, True, "bfloat16"),
        ({"avx512f"}, True, "float32"),  # torch would imitate it
        ({"avx512_bf16"}, False, "float32"),
        (set(), True, "float32"),
    ],
)
def test_a_processor_with_instructions_for_bfloat16_takes_it(
    flags: set[str], supported: bool, fastest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umim_core.backbone.devices.processor_flags", lambda: frozenset(flags))
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    assert fastest_dtype("cpu") == fastest


CONFIGS: dict[str, PreTrainedConfig] = {
    **{name: tiny_config(name) for name in ("llama", "mistral", "phi", "gpt2", "gpt-neo")},
    "llama, wide heads": tiny_config("llama", head_dim=32),
    "qwen2, tied": tiny_config("qwen2", tie_word_embeddings=True),
    "qwen3, wide heads": tiny_config("qwen3", head_dim=32),
    "gpt-neox": tiny_config("gpt_neox", intermediate_size=128),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_those_of_the_models_matrices(name: str) -> None:
    config = CONFIGS[name]
    matrices = {
        key: parameter.numel()
        for key, parameter in AutoModelForCausalLM.from_config(config).named_parameters()
        if parameter.ndim == 2 and "wpe" not in key
    }
    assert BackboneShape.of_config(config).weights == sum(matrices.values())


def test_of_a_model_at_hand_the_weights_of_its_blocks_are_counted() -> None:
    for name, config in family_configs.EXACT.items():
        model = family_configs.random_model(config)
        shape = BackboneShape.of_model(model)
        tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
        counted = sum(
            weight.numel()
            for weight in model.base_model.parameters()
            if weight.ndim == 2 and id(weight) not in tables
        )
        off = abs(shape.block_weights - counted)  # of a width of the feed-forward part
        assert off <= 1.5 * shape.layers * shape.hidden_size, name
        assert shape.head_weights == model.get_output_embeddings().weight.numel(), name


def test_a_backbone_on_this_machine_tells_its_shape(tmp_path: Path) -> None:
    shape = local_shape("umim-docs-gpt2")
    assert shape is not None
    assert (shape.hidden_size, shape.intermediate_size, shape.layers) == (192, 768, 4)
    assert (shape.tied, shape.gated_mlp) == (True, False)
    assert local_shape("no/such-model") is local_shape(str(tmp_path)) is None


@pytest.mark.parametrize("config", [FalconConfig(), MambaConfig()], ids=["falcon", "mamba"])
def test_a_family_of_another_build_is_refused(config: PreTrainedConfig) -> None:
    with pytest.raises(ConfigError, match=f"got {config.model_type}. State it in hardware.shapes"):
        BackboneShape.of_config(config)
