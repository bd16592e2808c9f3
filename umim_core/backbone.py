"""Frozen backbones: loading, fingerprints, and the three parts the method needs.

Shapes: B batch, S units, d embedding size, V vocabulary.
A causal LM is used as embed (ids -> [.., d]), hidden ([B, S, d] -> [B, S, d], final norm included)
and head ([.., d] -> [.., V]); at load a probe checks that the three give the model's own logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from umim_core.devices import usable_device
from umim_core.embedded.assets import embedded_names, embedded_path
from umim_core.encoding import encode
from umim_core.errors import BackboneError, ConfigError
from umim_core.fingerprint import model_fingerprint
from umim_core.fingerprint import special_ids as special_ids
from umim_core.fingerprint import tokenizer_fingerprint as tokenizer_fingerprint

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Backbone:
    """A frozen causal language model with its tokenizer.

    Attributes:
        name: As it was asked for ("umim-docs-llama", a directory, a hub repository).
        revision: Hub revision, or None.
        model: The transformers model; no parameter requires a gradient; evaluation mode.
        tokenizer: Its tokenizer, or None for models built in memory.
        fingerprint: SHA-256 of the architecture and the weights.
        tokenizer_fingerprint: SHA-256 of the vocabulary and the encoding pipeline ("" without one).
    """

    name: str
    revision: str | None
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    fingerprint: str
    tokenizer_fingerprint: str
    _embedding: nn.Module = field(repr=False)
    _trunk: nn.Module = field(repr=False)
    _head: nn.Module = field(repr=False)

    @property
    def hidden_size(self) -> int:
        """Embedding size d."""
        return int(self.embedding_weight.shape[1])

    @property
    def vocab_size(self) -> int:
        """Number of rows V of the embedding matrix."""
        return int(self.embedding_weight.shape[0])

    @property
    def embedding_weight(self) -> Tensor:
        """The input embedding matrix [V, d]."""
        return self._embedding.get_parameter("weight")

    @cached_property
    def embedding_std(self) -> float:
        """Standard deviation of the input embedding matrix."""
        return float(self.embedding_weight.float().std())

    @property
    def head_weight(self) -> Tensor:
        """The output projection [V, d]."""
        return self._head.get_parameter("weight")

    @property
    def head_bias(self) -> Tensor | None:
        """The output bias [V], or None."""
        bias = getattr(self._head, "bias", None)
        return bias if isinstance(bias, Tensor) else None

    @property
    def max_positions(self) -> int | None:
        """Longest sequence in units, or None if the configuration names none."""
        limit = getattr(self.model.config, "max_position_embeddings", None)
        return limit if isinstance(limit, int) else None

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embedding_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return self.embedding_weight.dtype

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that never take part in a rule: the tokenizer's special tokens."""
        return special_ids(self.tokenizer) if self.tokenizer is not None else frozenset()

    def embed(self, ids: Tensor) -> Tensor:
        """Look up static embeddings: ids [...] (int64) -> [..., d]."""
        out: Tensor = self._embedding(ids)
        return out

    def hidden(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Run the trunk.

        Args:
            inputs_embeds: [B, S, d].
            attention_mask: [B, S] (1 = real unit), or an additive float mask [B, 1, S, S], or None.
            position_ids: [B, S] or None for 0 .. S-1. They may jump.

        Returns:
            Hidden states after the final norm [B, S, d].
        """
        if attention_mask is None and position_ids is not None:
            # transformers would take a row whose positions jump for several sequences
            attention_mask = inputs_embeds.new_ones(inputs_embeds.shape[:2], dtype=torch.int64)
        out: Tensor = self._trunk(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
        ).last_hidden_state
        return out

    def head(self, hidden: Tensor) -> Tensor:
        """Project hidden states [..., d] to logits [..., V]."""
        out: Tensor = self._head(hidden)
        return out

    def encode(self, text: str, add_special_tokens: bool | None = False) -> list[int]:
        """Tokenize; see ``encode``."""
        return encode(self.require_tokenizer(), text, add_special_tokens)

    def decode(self, ids: list[int]) -> str:
        """Turn raw ids into text, special tokens left out, spaces as they are."""
        text = self.require_tokenizer().decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text if isinstance(text, str) else "".join(text)

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer.

        Raises:
            BackboneError: If the model was built in memory without one.
        """
        if self.tokenizer is None:
            raise BackboneError(
                "text needs a tokenizer", f"{self.name} has none", "Pass token ids instead."
            )
        return self.tokenizer


def resolve_backbone(name: str) -> str:
    """Return the directory of an embedded backbone, or ``name`` unchanged."""
    path = embedded_path(name, "backbone")
    return name if path is None else str(path)


def load_tokenizer(name: str, *, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer by embedded name, directory or hub repository.

    Raises:
        BackboneError: If it cannot be loaded.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            resolve_backbone(name), revision=revision, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError) as error:
        raise _load_error("tokenizer", name, error) from error
    return tokenizer


def load_backbone(
    name: str, *, revision: str | None = None, dtype: str = "float32", device: str = "cpu"
) -> Backbone:
    """Load and freeze a causal language model.

    Args:
        name: ``umim-docs-llama``, ``umim-docs-gpt2``, a directory or a hub repository.
        revision: Hub revision to pin.
        dtype: ``float32``, ``bfloat16``, ``float16`` or ``float64``.
        device: A torch device.

    Raises:
        BackboneError: If it cannot be loaded, needs code from the repository, or does not split
            into embedding, trunk and head.
        ConfigError: If the data type is unknown, or this machine has no such device.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {sorted(DTYPES)}", dtype, "Choose one of them.")
    usable_device(device)
    model = _load_model(name, revision, DTYPES[dtype])
    # float16 holds less of a published weight than the fingerprint hashes.
    published = _load_model(name, revision, "auto") if dtype == "float16" else model
    fingerprint = model_fingerprint(published)
    nn.Module.to(model, device)  # in place; the override in transformers has no usable type
    tokenizer = load_tokenizer(name, revision=revision)
    return wrap_backbone(model, tokenizer, name=name, revision=revision, fingerprint=fingerprint)


def _load_model(name: str, revision: str | None, dtype: torch.dtype | str) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            resolve_backbone(name),
            revision=revision,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,  # None would ask the user, who might agree
        )
    except (OSError, ValueError, ImportError, KeyError, SafetensorError) as error:
        raise _load_error("backbone", name, error) from error
    return model


def wrap_backbone(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    name: str = "in-memory",
    revision: str | None = None,
    fingerprint: str | None = None,
) -> Backbone:
    """Freeze a model that is already in memory; its fingerprint is computed unless it is given.

    Raises:
        BackboneError: If embedding, trunk and head do not give the model's own logits.
    """
    model.train(False).requires_grad_(False)
    # None where there is no output projection, and where there are no input embeddings
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # theirs
    if head is None or model.base_model is model:
        raise BackboneError(
            "a backbone must have input embeddings, a trunk and an output projection",
            type(model).__name__,
            "Use a causal language model.",
        )
    backbone = Backbone(
        name=name,
        revision=revision,
        model=model,
        tokenizer=tokenizer,
        fingerprint=fingerprint or model_fingerprint(model),
        tokenizer_fingerprint="" if tokenizer is None else tokenizer_fingerprint(tokenizer),
        _embedding=model.get_input_embeddings(),
        _trunk=model.base_model,
        _head=head,
    )
    _probe(backbone)
    return backbone


@torch.no_grad()
def _probe(backbone: Backbone) -> None:
    ids = torch.arange(4, device=backbone.device)[None] % backbone.vocab_size
    ours = backbone.head(backbone.hidden(backbone.embed(ids)))
    theirs = backbone.model(input_ids=ids, use_cache=False).logits
    if not torch.allclose(ours.float(), theirs.float(), rtol=1e-2, atol=1e-2):
        raise BackboneError(
            "head(trunk(embedding)) must equal the model's logits",
            type(backbone.model).__name__,
            "This architecture changes its logits after the head and is not supported.",
        )


def _load_error(what: str, name: str, error: Exception) -> BackboneError:
    reason = str(error).strip().splitlines()
    return BackboneError(
        f"a {what} must be an embedded name ({', '.join(embedded_names())}), a directory with "
        "safetensors weights, or a reachable hub repository without code of its own",
        f"{name!r}: {reason[0] if reason else type(error).__name__}",
        "Check the name; offline machines need a local directory.",
    )
