"""Tokenizers: loaded as transformers would, refused at once where there is none."""

from __future__ import annotations

import socket

import pytest
from transformers import AutoTokenizer

from umim_core.backbone.fingerprint import tokenizer_fingerprint
from umim_core.backbone.tokenizer_files import load_tokenizer, resolve_backbone
from umim_core.embedded.assets import embedded_names
from umim_core.errors import BackboneError


@pytest.mark.parametrize("name", embedded_names())
def test_the_short_way_gives_what_transformers_gives(name: str) -> None:
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
def test_a_missing_one_is_told_at_once_and_by_what_it_looks_like(name: str, value: str) -> None:
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
