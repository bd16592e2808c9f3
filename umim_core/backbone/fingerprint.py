"""Fingerprints of tokenizers, and the identity of a backbone's version without loading it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from huggingface_hub import snapshot_download
from transformers import PreTrainedTokenizerBase

from umim_core.backbone.tokenizer_files import check_place
from umim_core.errors import BackboneError
from umim_core.model_sources.packaged_model import PACKAGED
from umim_core.store.artifacts import json_digest, sha256_bytes, sha256_file
from umim_core.store.user_records import SHA256, remembered

_LARGE: Final = 1 << 20  # characters of a tokenizer's JSON: reading and writing it takes 0.2 s


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of a tokenizer's special tokens.

    They are those with a role (end, padding ...) and every added token that is flagged special, as
    the marks of a chat's turns are.
    """
    flagged = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(int(i) for i in flagged.union(tokenizer.all_special_ids))


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase, without: object = None) -> str:
    """Return the SHA-256 of what decides which ids a text gets.

    It covers vocabulary, merges, normaliser, pre-tokenizer and added tokens; padding, truncation
    and the chat template are left out. Tokenizers of one size with different vocabularies differ.
    An added token that is named ``without`` is left out, too: many add one for padding, to train in
    batches; it decides about no text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state: object = {
            "vocab": tokenizer.get_vocab(),
            "class": type(tokenizer).__name__,
            "special": tokenizer.all_special_tokens,
        }
        return json_digest(state)
    text = backend.to_str()
    if len(text) < _LARGE:
        return json_digest(_pipeline(text, without))
    key = [repr(without), sha256_bytes(text.encode())]
    return remembered("tokenizers", key, SHA256, lambda: json_digest(_pipeline(text, without)))


def _pipeline(text: str, without: object) -> dict[str, object]:
    pipeline: dict[str, object] = json.loads(text)
    ignored = ("padding", "truncation", "post_processor")
    state = {name: part for name, part in pipeline.items() if name not in ignored}
    added = pipeline.get("added_tokens")
    if isinstance(added, list):
        state["added_tokens"] = [token for token in added if token["content"] != without]
    return state


def backbone_identity(name: str, revision: str | None) -> str:
    """Return what tells one version of a backbone from another, without loading it.

    For a hub repository it is the commit, else the SHA-256 of configuration and weights, which of
    a packaged model are known before it is fetched.
    """
    if name in PACKAGED:
        return _identity(PACKAGED[name].files)
    directory = Path(check_place("backbone", name, "config.json", revision))
    if directory.is_dir():
        files = [*directory.glob("config.json"), *directory.glob("*.safetensors")]
        return _identity({path.name: sha256_file(path) for path in files})
    try:
        snapshot = snapshot_download(name, revision=revision, allow_patterns=["config.json"])
    except (OSError, ValueError) as error:
        rule = "a backbone must be a known name, a directory or a reachable hub repository"
        remedy = "Check the name; offline machines need a local directory."
        raise BackboneError(rule, name, remedy) from error
    return f"{name}@{Path(snapshot).name}"  # the folder of a snapshot is named by its commit


def _identity(sums: Mapping[str, str]) -> str:
    """Return the SHA-256 over those of configuration and weights, out of a directory's files."""
    lines = [
        f"{name} {digest}"
        for name, digest in sorted(sums.items())
        if name == "config.json" or name.endswith(".safetensors")
    ]
    return sha256_bytes("\n".join(lines).encode())
