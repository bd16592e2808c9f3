"""Fingerprints: what a tokenizer is, independent of where it was loaded from."""

from __future__ import annotations

import json

from transformers import PreTrainedTokenizerBase

from umim_core.store.artifacts import canonical_json, sha256_bytes


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of a tokenizer's special tokens.

    They are those with a role (end, padding ...) and every added token that is flagged special, as
    the marks of a chat's turns are.
    """
    flagged = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(int(i) for i in flagged.union(tokenizer.all_special_ids))


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of what decides which ids a text gets.

    It covers vocabulary, merges, normaliser, pre-tokenizer and added tokens; padding, truncation
    and the chat template are left out. Tokenizers of one size with different vocabularies differ.
    """
    return _fingerprint(tokenizer, None)


def unpadded_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the fingerprint of a tokenizer without its padding token, if that was added to it.

    Many add one to train in batches; it decides about no text.
    """
    return _fingerprint(tokenizer, tokenizer.pad_token)


def _fingerprint(tokenizer: PreTrainedTokenizerBase, without: object) -> str:
    """Return the SHA-256 of a tokenizer, an added token left out."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state: object = {
            "vocab": tokenizer.get_vocab(),
            "class": type(tokenizer).__name__,
            "special": tokenizer.all_special_tokens,
        }
    else:
        pipeline: dict[str, object] = json.loads(backend.to_str())
        ignored = ("padding", "truncation", "post_processor")
        state = {name: part for name, part in pipeline.items() if name not in ignored}
        added = pipeline.get("added_tokens")
        if isinstance(added, list):
            state["added_tokens"] = [token for token in added if token["content"] != without]
    return sha256_bytes(canonical_json(state).encode())
