"""Backbones and tokenizers: by name, from directories, in memory, from a hub's cache."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import pytest
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from support.merged_models import fresh_model
from support.tiny_models import random_model, tiny_config
from umim_core import UMIM
from umim_core.backbone.backbone import Backbone, load_backbone, wrap_backbone
from umim_core.backbone.fingerprint import tokenizer_fingerprint
from umim_core.backbone.tokenizer_files import load_tokenizer, resolve_backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.embedded.assets import embedded_names
from umim_core.errors import BackboneError, BackboneMismatchError


def test_a_model_in_memory_may_name_its_revision_and_have_no_tokenizer() -> None:
    model = random_model(tiny_config())
    backbone = wrap_backbone(model, None, revision="r" * 40)
    assert (wrap_backbone(model, None).revision, backbone.revision) == (None, "r" * 40)
    assert (backbone.special_ids, backbone.tokenizer_fingerprint) == (frozenset(), "")
    with pytest.raises(BackboneError, match="text needs a tokenizer; got in-memory has none"):
        backbone.encode("w1")


def test_a_model_without_output_projection_is_refused() -> None:
    config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(BackboneError, match="and an output projection; got BertModel"):
        wrap_backbone(BertModel(config), None)


def test_text_is_encoded_without_special_tokens_and_decoded_without_them(
    tiny_llama: Backbone,
) -> None:
    assert tiny_llama.encode("w3 w1 w31") == [3, 1, 31]
    assert tiny_llama.encode("") == []
    assert tiny_llama.decode([3, 0, 1]) == "w3 w1"


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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Callable[[str, int], PreTrainedModel],
    tiny_tokenizer: PreTrainedTokenizerFast,
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
