"""Backbones and tokenizers: parts of many architectures, fingerprints, threads, what is refused."""

from __future__ import annotations

import io
import json
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel, PreTrainedModel

from support.tiny_models import random_model, tiny_config
from umim_core.backbone.backbone import Backbone, load_backbone, wrap_backbone
from umim_core.backbone.fingerprint import tokenizer_fingerprint
from umim_core.backbone.tokenizer_files import load_tokenizer, resolve_backbone
from umim_core.embedded.assets import embedded_names
from umim_core.errors import BackboneError
from umim_core.evaluation.harness import UmimLM


def test_a_model_in_memory_may_name_its_revision() -> None:
    model = random_model(tiny_config())
    assert wrap_backbone(model, None).revision is None
    assert wrap_backbone(model, None, revision="r" * 40).revision == "r" * 40


def test_a_model_without_output_projection_is_refused() -> None:
    config = BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    with pytest.raises(BackboneError, match="and an output projection; got BertModel"):
        wrap_backbone(BertModel(config), None)


def test_text_is_encoded_without_special_tokens_and_decoded_without_them(
    tiny_llama: Backbone,
) -> None:
    assert tiny_llama.encode("w3 w1 w31") == [3, 1, 31]
    assert tiny_llama.encode("") == []
    assert tiny_llama.decode([3, 0, 1]) == "w3 w1"


def test_text_without_a_tokenizer_is_refused(
    tiny_model: Callable[[str, int], PreTrainedModel],
) -> None:
    backbone = wrap_backbone(tiny_model("llama", 0), None)
    assert (backbone.special_ids, backbone.tokenizer_fingerprint) == (frozenset(), "")
    with pytest.raises(BackboneError, match="text needs a tokenizer; got in-memory has none"):
        backbone.encode("w1")


@pytest.fixture
def saved(tiny_llama: Backbone, tmp_path: Path) -> Path:
    tiny_llama.model.save_pretrained(tmp_path)
    tiny_llama.tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_directory_loads_with_the_fingerprints_it_was_saved_with(
    tiny_llama: Backbone, saved: Path, dtype: str
) -> None:
    back = load_backbone(str(saved), dtype=dtype)
    assert back.fingerprint == tiny_llama.fingerprint
    assert back.tokenizer_fingerprint == tiny_llama.tokenizer_fingerprint
    assert str(back.dtype) == f"torch.{dtype}"


def test_an_unknown_name_lists_the_embedded_ones(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    for load in (load_backbone, load_tokenizer):
        with pytest.raises(BackboneError) as caught:
            load(missing)
        message = str(caught.value)
        assert "umim-docs-gpt2, umim-docs-llama" in message
        assert "nowhere" in message
        assert "without code of its own" in message


def test_torn_weights_are_refused(saved: Path) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(BackboneError, match="a directory with safetensors weights"):
        load_backbone(str(saved))


def test_pickled_weights_are_not_read(saved: Path, tiny_llama: Backbone) -> None:
    (saved / "model.safetensors").unlink()
    torch.save(tiny_llama.model.state_dict(), saved / "pytorch_model.bin")
    with pytest.raises(BackboneError, match="a directory with safetensors weights"):
        load_backbone(str(saved))


def add_code(directory: Path, model_type: str) -> Path:
    """Give a saved backbone code of its own that leaves a trace when it is imported."""
    trace = directory / "fired"
    (directory / "evil.py").write_text(
        f"from pathlib import Path\nPath({str(trace)!r}).touch()\n"
        "from transformers import LlamaConfig as C, LlamaForCausalLM as M\n"
        "from transformers import PreTrainedTokenizerFast as T\n"
    )
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "model_type": model_type,
        "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},
    }
    (directory / "config.json").write_text(json.dumps(config))
    path = directory / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": [None, "evil.T"]}
    path.write_text(json.dumps(tokenizer))
    return trace


def test_code_from_a_repository_is_refused_even_if_the_user_would_agree(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = add_code(saved, "evil")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    with pytest.raises(BackboneError, match="without code of its own"):
        load_backbone(str(saved))
    with pytest.raises(BackboneError, match="without code of its own"):  # as lm-eval loads it
        UmimLM(backbone=str(saved), merge="none")
    assert not trace.exists()


def test_code_beside_a_known_architecture_is_refused(saved: Path) -> None:
    trace = add_code(saved, "llama")
    with pytest.raises(BackboneError, match=r"backbone must come without code of its own; .*evil"):
        load_backbone(str(saved))
    with pytest.raises(BackboneError, match="tokenizer must come without code of its own"):
        load_tokenizer(str(saved))
    assert not trace.exists()


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("./nowhere", "a path that does not exist"),
        ("a/b/c", "a path that does not exist"),
        ("nosuch", "neither a directory nor downloaded before"),
        ("umim-docs-lama", "Did you mean 'umim-docs-llama'?"),
    ],
)
def test_a_missing_tokenizer_is_told_at_once_and_by_what_it_looks_like(
    name: str, value: str
) -> None:
    with pytest.raises(BackboneError) as caught:
        load_tokenizer(name, local_files_only=True)
    assert value in str(caught.value)


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
    assert len(asked) == 1
