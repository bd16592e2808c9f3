"""Frozen backbones: loading, fingerprints, and the three parts the method needs.

Shapes: B batch, S units, W units of a step on a cache, d embedding size, V vocabulary.
A causal LM is used as embed (ids -> [.., d]), hidden ([B, S, d] -> [B, S, d], final norm included)
and head ([.., d] -> [.., V]). What the method needs of it is tried once, when a model is wrapped
(``trials``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from umim_core.backbone.attention_masks import attention_window, step_mask
from umim_core.backbone.devices import fastest_dtype, usable_device
from umim_core.backbone.model_files import (
    AUTO,
    DTYPES,
    PUBLISHED,
    check_dtype,
    freeze,
    frozen_twin,
    load_complete,
    weight_files,
)
from umim_core.backbone.model_identity import ModelIdentity, cached_weight_lines, model_identity
from umim_core.backbone.row_cache import RowCache
from umim_core.backbone.shape import positions_of
from umim_core.backbone.tokenizer_files import (
    check_place,
    load_tokenizer,
    special_ids,
    tokenizer_fingerprint,
)
from umim_core.backbone.trials import check_capabilities
from umim_core.errors import BackboneError, GenerationError, UmimError, require
from umim_core.text.token_ids import decode, encode

_TABLE_CHUNK: Final = 8192  # rows


@dataclass(frozen=True)
class Backbone:
    """A frozen causal language model with its tokenizer.

    Attributes:
        name: As it was asked for ("umim-docs-llama", a directory, a hub repository).
        model: The transformers model; no parameter requires a gradient; evaluation mode.
        tokenizer: Its tokenizer, or None for models built in memory.
        identity: Architecture, configuration and weights in digests.
        tokenizer_fingerprint: SHA-256 of the vocabulary and the encoding pipeline ("" without one).
    """

    name: str
    revision: str | None
    model: PreTrainedModel = field(repr=False)
    tokenizer: PreTrainedTokenizerBase | None = field(repr=False)
    identity: ModelIdentity = field(repr=False)
    tokenizer_fingerprint: str

    def __repr__(self) -> str:
        sizes = f"d {self.hidden_size}, V {self.vocab_size}, {self.dtype} on {self.device}"
        return f"Backbone({self.name!r}, {type(self.model).__name__}, {sizes})"

    @cached_property
    def fingerprint(self) -> str:
        return self.identity.fingerprint

    @cached_property
    def embedding(self) -> nn.Module:
        """Turns ids into what the trunk reads, scaled if the model scales it."""
        return self.model.get_input_embeddings()

    @cached_property
    def trunk(self) -> nn.Module:
        """The blocks with the final norm."""
        return self.model.base_model

    @cached_property
    def projection(self) -> nn.Module:
        # None where there is no output projection, and where there are no input embeddings
        head: nn.Module | None = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]  # theirs
        if head is None or self.trunk is self.model:
            rule = "a backbone must have input embeddings, a trunk and an output projection"
            raise BackboneError(rule, type(self.model).__name__, "Use a causal language model.")
        return head

    @property
    def hidden_size(self) -> int:
        return int(self.embedding_weight.shape[1])

    @property
    def vocab_size(self) -> int:
        return int(self.embedding_weight.shape[0])

    @property
    def num_layers(self) -> int:
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
        return float(self.embedding_table.float().std())

    @property
    def head_weight(self) -> Tensor:
        return self.projection.get_parameter("weight")

    @property
    def head_bias(self) -> Tensor | None:
        bias = getattr(self.projection, "bias", None)
        return bias if isinstance(bias, Tensor) else None

    @property
    def max_positions(self) -> int | None:
        """Longest sequence in units, or None if the configuration names none."""
        return positions_of(self.model.config)

    @cached_property
    def window(self) -> int | None:
        """Shortest attention window in units; None without windows."""
        return attention_window(self.model.config)

    @property
    def limits(self) -> list[int]:
        """Positions and window, those that it has."""
        return [limit for limit in (self.max_positions, self.window) if limit is not None]

    def check_positions(
        self, what: str, positions: int, error: type[UmimError], remedy: str, found: str = ""
    ) -> None:
        """Refuse more positions than there are; messages say ``what`` takes them."""
        most = self.max_positions
        rule = f"{what} must fit the backbone's {most} positions"
        if most != getattr(self.model.config, "max_position_embeddings", most):
            rule += " (LongRoPE's first frequencies)"
        fits = most is None or positions <= most
        require(fits, error, rule, found or f"{positions} positions", remedy)

    def check_window(self, length: int) -> None:
        """Refuse sequences that are longer than a layer's attention window.

        Within its window a sliding-window layer is plain causal attention. Beyond it the backbone's
        own masks are right where columns are units: for one row with compact positions, and for
        rows without branches that are read at once. A mask of ours, for rows of different lengths
        or for branches, would take the place of windows; who makes one asks here first.
        """
        rule = (
            f"rows together must not be longer than the backbone's attention window ({self.window})"
        )
        remedy = "Use one prompt at a time (compact positions), shorter ones, or fewer new tokens."
        fits = self.window is None or length <= self.window
        require(fits, GenerationError, rule, f"{length} units", remedy)

    @property
    def device(self) -> torch.device:
        return self.embedding_weight.device

    @property
    def dtype(self) -> torch.dtype:
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

    def on_cache(
        self, inputs_embeds: Tensor, cache: RowCache, position_ids: Tensor | None = None
    ) -> Tensor:
        """Run the trunk on W units per row [B, W, d] on top of a cache, between its calls.

        Positions [B, W] are None where units take their columns'.
        """
        out: Tensor = self.trunk(
            inputs_embeds=inputs_embeds,
            attention_mask=step_mask(cache, inputs_embeds.dtype),
            position_ids=cache.plan.columns if position_ids is None else position_ids,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return out

    def head(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.projection(hidden)
        return out

    def encode(self, text: str, add_special_tokens: bool | None = False) -> list[int]:
        return encode(self.require_tokenizer(), text, add_special_tokens)

    def decode(self, ids: list[int]) -> str:
        return decode(self.require_tokenizer(), ids)

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
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
    attn_implementation: str | None = None,
    local_files_only: bool = False,
) -> Backbone:
    """Load and freeze a causal language model.

    ``name`` is an embedded or packaged name, a directory, a GGUF file or a hub repository,
    ``dtype`` a key of ``DTYPES``, ``published`` for what the weights were published in, or ``auto``
    for the fastest of the device (``fastest_dtype``), which is the CPU if not given.
    """
    device = usable_device("cpu" if device is None else device)
    check_dtype(dtype)
    if dtype == AUTO:
        dtype = fastest_dtype(device)
    where = check_place("backbone", name, "config.json", revision, local_files_only)

    def load(dtype: str) -> PreTrainedModel:
        return load_complete(
            AutoModelForCausalLM,
            where,
            what="backbone",
            name=name,
            complete="a causal language model",
            revision=revision,
            local_files_only=local_files_only,
            dtype=DTYPES.get(dtype, "auto"),  # transformers' name of the published one
            attn_implementation=attn_implementation,
        )

    model = load(dtype)
    # float16 holds less of a published weight than the fingerprint hashes.
    lines = cached_weight_lines(
        weight_files(where, revision),
        model,
        lambda: load(PUBLISHED) if dtype == "float16" else model,
    )
    nn.Module.to(model, device)  # in place; transformers' override has no usable type
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
        rule = "a backbone must be a model of transformers itself"
        remedy = "Unwrap it; of PEFT models, take merge_and_unload()."
        raise BackboneError(rule, type(model).__name__, remedy)
    fits = tokenizer is None or isinstance(tokenizer, PreTrainedTokenizerBase)
    rule, remedy = "a tokenizer must be one of transformers", "Load it with AutoTokenizer."
    require(fits, BackboneError, rule, type(tokenizer).__name__, remedy)
    return _wrap(frozen_twin(model), tokenizer, name, revision, model_identity(model))


def _wrap(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    name: str,
    revision: str | None,
    identity: ModelIdentity,
) -> Backbone:
    backbone = Backbone(
        name=name,
        revision=revision,
        model=model,
        tokenizer=tokenizer,
        identity=identity,
        tokenizer_fingerprint="" if tokenizer is None else tokenizer_fingerprint(tokenizer),
    )
    check_capabilities(backbone)
    return backbone
