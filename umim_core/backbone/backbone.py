"""Frozen backbones: loading, fingerprints, and the three parts the method needs.

Shapes: B batch, S units, d embedding size, V vocabulary.
A causal LM is used as embed (ids -> [.., d]), hidden ([B, S, d] -> [B, S, d], final norm included)
and head ([.., d] -> [.., V]); at load a probe checks that the three give the model's own logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from umim_core.backbone.capabilities import check_capabilities
from umim_core.backbone.devices import default_device, fastest_dtype, usable_device
from umim_core.backbone.fingerprint import special_ids, tokenizer_fingerprint
from umim_core.backbone.model_files import (
    AUTO,
    PUBLISHED,
    check_dtype,
    freeze,
    frozen_twin,
    load_model,
    weight_files,
)
from umim_core.backbone.model_identity import (
    ModelIdentity,
    cached_weight_lines,
    model_identity,
)
from umim_core.backbone.tokenizer_files import load_tokenizer, resolve_backbone
from umim_core.errors import BackboneError, ConfigError
from umim_core.text.token_ids import decode, encode

_TABLE_CHUNK = 8192  # rows


@dataclass(frozen=True)
class Backbone:
    """A frozen causal language model with its tokenizer.

    Attributes:
        name: As it was asked for ("umim-docs-llama", a directory, a hub repository).
        revision: Hub revision, or None.
        model: The transformers model; no parameter requires a gradient; evaluation mode.
        tokenizer: Its tokenizer, or None for models built in memory.
        identity: Architecture, configuration and weights in digests.
        tokenizer_fingerprint: SHA-256 of the vocabulary and the encoding pipeline ("" without one).
        embedding: Turns ids into what the trunk reads, scaled if the model scales it.
        trunk, projection: The blocks with the final norm, and the head as a module.
    """

    name: str
    revision: str | None
    model: PreTrainedModel = field(repr=False)
    tokenizer: PreTrainedTokenizerBase | None = field(repr=False)
    identity: ModelIdentity = field(repr=False)
    tokenizer_fingerprint: str
    embedding: nn.Module = field(repr=False)
    trunk: nn.Module = field(repr=False)
    projection: nn.Module = field(repr=False)

    def __repr__(self) -> str:
        """Return name, architecture, sizes, data type and device."""
        sizes = f"d {self.hidden_size}, V {self.vocab_size}, {self.dtype} on {self.device}"
        return f"Backbone({self.name!r}, {type(self.model).__name__}, {sizes})"

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the architecture, the configuration and the weights."""
        return self.identity.fingerprint

    @property
    def hidden_size(self) -> int:
        """Embedding size d."""
        return int(self.embedding_weight.shape[1])

    @property
    def vocab_size(self) -> int:
        """Number of rows V of the embedding matrix."""
        return int(self.embedding_weight.shape[0])

    @property
    def num_layers(self) -> int:
        """Number of layers L of the trunk."""
        return int(self.model.config.num_hidden_layers)

    @property
    def embedding_weight(self) -> Tensor:
        """The input embedding matrix [V, d] as it is stored; see ``embedding_table``."""
        return self.embedding.get_parameter("weight")

    @property
    @torch.no_grad()
    def embedding_table(self) -> Tensor:
        """Embedding of every id as the trunk reads it [V, d]; Gemma, for one, scales it."""
        ids = torch.arange(self.vocab_size, device=self.device)
        return torch.cat([self.embed(part) for part in torch.split(ids, _TABLE_CHUNK)])

    @cached_property
    def embedding_std(self) -> float:
        """Standard deviation of that table."""
        return float(self.embedding_table.float().std())

    @property
    def head_weight(self) -> Tensor:
        """The output projection [V, d]."""
        return self.projection.get_parameter("weight")

    @property
    def head_bias(self) -> Tensor | None:
        """The output bias [V], or None."""
        bias = getattr(self.projection, "bias", None)
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

    def has_tokenizer(self, fingerprint: str | None) -> bool:
        """Return whether a fingerprint is the tokenizer's, or what it would be without padding.

        A padding token that was added to it does not count.
        """
        return fingerprint == self.tokenizer_fingerprint or fingerprint == self._unpadded

    @property
    def named_tokenizer(self) -> str:
        """The tokenizer for people: whose it is, its entries and its first digits."""
        size = "no tokenizer" if self.tokenizer is None else f"{len(self.tokenizer):,} entries"
        return f"{self.name}, {size} ({self.tokenizer_fingerprint[:12]})"

    @cached_property
    def _unpadded(self) -> str:
        """The tokenizer's fingerprint without its padding token; 0.2 s at 49,152 entries."""
        if self.tokenizer is None:
            return ""
        return tokenizer_fingerprint(self.tokenizer, without=self.tokenizer.pad_token)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that never take part in a rule: the tokenizer's special tokens."""
        return special_ids(self.tokenizer) if self.tokenizer is not None else frozenset()

    def embed(self, ids: Tensor) -> Tensor:
        """Look up static embeddings: ids [...] (int64) -> [..., d]."""
        out: Tensor = self.embedding(ids)
        return out

    def hidden(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Run the trunk on [B, S, d] and return hidden states after the final norm [B, S, d].

        The mask is [B, S] (1 = real unit), or additive and floating [B, 1, S, S]; positions [B, S]
        may jump, None for 0 .. S-1.
        """
        if attention_mask is None and position_ids is not None:
            # transformers would take a row whose positions jump for several sequences
            attention_mask = inputs_embeds.new_ones(inputs_embeds.shape[:2], dtype=torch.int64)
        out: Tensor = self.trunk(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
        ).last_hidden_state
        return out

    def head(self, hidden: Tensor) -> Tensor:
        """Project hidden states [..., d] to logits [..., V]."""
        out: Tensor = self.projection(hidden)
        return out

    def encode(self, text: str, add_special_tokens: bool | None = False) -> list[int]:
        """Tokenize; see ``encode``."""
        return encode(self.require_tokenizer(), text, add_special_tokens)

    def decode(self, ids: list[int]) -> str:
        """Turn raw ids into text, special tokens left out, spaces as they are."""
        return decode(self.require_tokenizer(), ids)

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer."""
        if self.tokenizer is None:
            raise BackboneError(
                "text needs a tokenizer", f"{self.name} has none", "Pass token ids instead."
            )
        return self.tokenizer


def load_backbone(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    device: str | None = None,
    device_map: str | dict[str, int | str] | None = None,
    attn_implementation: str | None = None,
    local_files_only: bool = False,
) -> Backbone:
    """Load and freeze a causal language model.

    Args:
        name: Embedded or packaged name, directory, GGUF file or hub repository.
        revision: Hub revision to pin.
        dtype: A key of ``DTYPES``, ``published`` for what the weights were published in, or
            ``auto`` for the fastest of the device (``fastest_dtype``).
        device: A torch device; the CPU if neither it nor a ``device_map`` is given.
        device_map: As in transformers; all weights must come to one device.
        attn_implementation: ``eager`` or ``sdpa``.
        local_files_only: Whether the network must not be asked.
    """
    if device is not None and device_map is not None:
        raise ConfigError("device and device_map must not both be given", device, "Leave one out.")
    usable_device(device or "cpu")
    check_dtype(dtype)
    if dtype == AUTO:
        dtype = fastest_dtype(device or ("cpu" if device_map is None else default_device()))
    load = partial(
        load_model,
        name,
        revision=revision,
        device_map=device_map,
        attn_implementation=attn_implementation,
        local_files_only=local_files_only,
    )
    model = load(dtype=dtype)
    files = weight_files(resolve_backbone(name, local_files_only=local_files_only), revision)
    # float16 holds less of a published weight than the fingerprint hashes.
    lines = cached_weight_lines(
        files, model, lambda: load(dtype=PUBLISHED) if dtype == "float16" else model
    )
    if device_map is None:
        nn.Module.to(model, device or "cpu")  # in place; transformers' override has no usable type
    tokenizer = load_tokenizer(name, revision=revision, local_files_only=local_files_only)
    return _wrap(freeze(model), tokenizer, name, revision, model_identity(model, lines))


def wrap_backbone(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    name: str = "in-memory",
    revision: str | None = None,
) -> Backbone:
    """Make a backbone of a causal language model of transformers that is already in memory.

    It has a frozen twin that shares the weights: the model keeps its mode, gradients and
    configuration. Weights that change later change the backbone, but not its fingerprint.
    Without a tokenizer only ids can be used; messages and checkpoints call it ``name``, with the
    hub's ``revision`` if it has one.
    """
    if not isinstance(model, PreTrainedModel):
        raise BackboneError(
            "a backbone must be a model of transformers itself",
            type(model).__name__,
            "Unwrap it; of PEFT models, take merge_and_unload().",
        )
    return _wrap(frozen_twin(model), tokenizer, name, revision, model_identity(model))


def _wrap(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    name: str,
    revision: str | None,
    identity: ModelIdentity,
) -> Backbone:
    """Take a frozen model apart and try it."""
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
        identity=identity,
        tokenizer_fingerprint="" if tokenizer is None else tokenizer_fingerprint(tokenizer),
        embedding=model.get_input_embeddings(),
        trunk=model.base_model,
        projection=head,
    )
    check_capabilities(backbone)
    return backbone
