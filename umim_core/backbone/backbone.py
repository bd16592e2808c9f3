"""Frozen backbones: loading, fingerprints, and the three parts the method needs.

Shapes: B batch, S units, d embedding size, V vocabulary.
A causal LM is used as embed (ids -> [.., d]), hidden ([B, S, d] -> [B, S, d], final norm included)
and head ([.., d] -> [.., V]). What the method needs is tried once, when a model is wrapped.

The rest relies on it: columns are hidden, rows of different lengths share a forward, units are
taken back from the cache. Six forwards of a few units show whether a model does that exactly::

    F1  the model on ids     a0 a1 a2 a3 a4 a5        its head's input, what becomes of its output
    F2  embeddings           positions 0 1 2 ...      equals F1
        and with jumps       positions 0 2 3 5 ..
    F3  columns              a0 x a1 a2 .. x a5       x is hidden by an additive mask; what is left
                                                      equals F2, at its positions
    F4  two rows, cached     a0 .. a5 | b0 .. b3      equals each row alone (F1, F5)
    F5  the short row alone  b0 .. b3
    F6  units taken back     a0 .. a3 + a4 | b0 .. b2 + b3   equals F1 and F5 again

n units are tried, W columns a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Final

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from umim_core.backbone.attention_masks import additive_mask, attention_window, step_mask
from umim_core.backbone.devices import fastest_dtype, usable_device
from umim_core.backbone.fingerprint import special_ids, tokenizer_fingerprint
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
from umim_core.backbone.tokenizer_files import (
    FOREIGN_ERRORS,
    check_place,
    first_line,
    load_tokenizer,
)
from umim_core.errors import BackboneError, GenerationError, UmimError, require
from umim_core.text.token_ids import decode, encode

_TABLE_CHUNK: Final = 8192  # rows
_UNITS: Final = 6
# Largest difference of two ways to the same states, of their norm. Sums in another order differ by
# less; a model that swallows positions, or lets a row see another, is off by far more. Some
# families compute parts in single precision whatever their weights are.
_TOLERANCE: Final = {
    torch.float64: 1e-5,
    torch.float32: 1e-4,
    torch.float16: 0.02,
    torch.bfloat16: 0.1,
}
# Attention that takes no additive mask.
_MASKLESS: Final = ("flash", "flex", "paged")


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
        limit = getattr(self.model.config, "max_position_embeddings", None)
        return limit if isinstance(limit, int) else None

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


@torch.no_grad()
def check_capabilities(backbone: Backbone) -> None:
    _check_parts(backbone)
    n = _units(backbone)
    with typed_failures(backbone, "a backbone must answer token ids with logits"):
        plain = _check_head(backbone, n)
    row = _ids(backbone, 0, n)
    rule = "a backbone must read embeddings at given positions, under a 4-D mask"
    with typed_failures(backbone, rule):
        _check_positions(backbone, row, plain)
    rule = "a backbone must read rows of different lengths on top of a cache"
    with typed_failures(backbone, rule):
        _check_cache(backbone, row, _ids(backbone, n, 2 * n - 2), plain)


def _check_parts(backbone: Backbone) -> None:
    """Refuse a model without the parts that the method uses; no forward is run."""
    model, head = backbone.model, backbone.projection
    devices = {str(parameter.device) for parameter in model.parameters()}
    rule = "all weights of a backbone must be on one device"
    value = ", ".join(sorted(devices)) or "no weights"
    remedy = "Choose a device that holds all of them."
    _require(backbone, len(devices) == 1 and devices != {"meta"}, rule, value, remedy)
    remedy = "Quantise the blocks only, and leave embeddings and output projection as they are."
    for what, module in (("input embeddings", backbone.embedding), ("head", head)):
        weight = getattr(module, "weight", None)
        rule = f"the {what} of a backbone must have a floating weight matrix"
        fits = isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_floating_point()
        _require(backbone, fits, rule, type(module).__name__, remedy)
    implementation = str(model.config._attn_implementation)
    rule = "a backbone's attention must take an additive mask"
    fits = not any(word in implementation for word in _MASKLESS)
    remedy = "Load it with attn_implementation='sdpa'."
    _require(backbone, fits, rule, implementation, remedy)
    fits = "position_ids" in signature(backbone.trunk.forward).parameters
    value = "its positions follow from columns (ALiBi, for one) or from a state"
    remedy = "Use a model with rotary or learned positions."
    _require(backbone, fits, "a backbone must take position_ids", value, remedy)
    rule = "every layer of a backbone must be full or sliding-window attention"
    remedy = "Recurrent states cannot be rolled back; use an attention-only model."
    with typed_failures(backbone, rule, remedy):
        _ = backbone.window


def _units(backbone: Backbone) -> int:
    """Return how many units are tried: two columns more must fit positions and windows."""
    n = min([_UNITS, *(limit - 2 for limit in backbone.limits)])
    rule = "a backbone must have at least 5 positions, and windows as long"
    found = " and ".join(map(str, backbone.limits))
    _require(backbone, n >= 3, rule, found, "Use a larger one.")
    return n


def _ids(backbone: Backbone, first: int, end: int) -> Tensor:
    return torch.arange(first, end, device=backbone.device)[None] % backbone.vocab_size


def _check_head(backbone: Backbone, n: int) -> Tensor:
    """Return the states [1, n, d] that the model's own forward hands to its head."""
    inputs, linear = [], []

    def with_ramp(head: nn.Module, arguments: tuple[Tensor, ...], out: Tensor) -> Tensor:
        inputs.append(arguments[0])
        weight, bias = backbone.head_weight, backbone.head_bias
        straight = nn.functional.linear(arguments[0].to(weight.dtype), weight, bias)
        linear.append(state_difference(out, straight))
        return _ramp(out)

    handle = backbone.projection.register_forward_hook(with_ramp)
    try:
        logits = backbone.model(input_ids=_ids(backbone, 0, n), use_cache=False).logits
    finally:
        handle.remove()
    fits = len(inputs) == 1 and linear[0] <= state_tolerance(backbone)
    rule = "a backbone's head must be one linear projection"
    value = f"{type(backbone.projection).__name__}, called {len(inputs)} times"
    remedy = "Merge adapters into the weights; quantise the blocks only."
    _require(backbone, fits, rule, value, remedy)
    rule = "head(trunk(embedding)) must equal the model's logits"
    fits = torch.equal(logits.float(), _ramp(logits).float())
    value = "they are scaled, capped or shifted behind the head"
    remedy = "This architecture changes its logits after the head and is not supported."
    _require(backbone, fits, rule, value, remedy)
    states = backbone.hidden(backbone.embed(_ids(backbone, 0, n)))
    remedy = "This architecture changes its embeddings or states outside its trunk."
    _same(backbone, rule, states, inputs[0], remedy)
    return states


def _ramp(out: Tensor) -> Tensor:
    """Return logits like ``out`` [.., V]: multiples of 32 up to 4064, exact in every data type."""
    steps = torch.arange(out.shape[-1], device=out.device) % 255 - 127
    return (steps * 32).to(out.dtype).expand_as(out).clone()


def _check_positions(backbone: Backbone, row: Tensor, plain: Tensor) -> None:
    """Compare rows whose hidden columns shift or stretch positions with rows without them."""
    n = row.shape[1]
    places = torch.tensor([0, *range(2, n), n + 1], device=row.device)
    columns = torch.arange(n + 2, device=row.device)
    compact = columns.clone()
    compact[places] = columns[:n]
    positions = torch.stack([compact, columns])
    embeddings = backbone.embed(row).expand(2, -1, -1)
    apart = backbone.hidden(embeddings, position_ids=positions[:, places])
    rule = "position_ids 0, 1, 2, ... must change nothing"
    remedy = "This model takes positions from somewhere else and is not supported."
    _same(backbone, rule, apart[:1], plain, remedy)
    stretched = backbone.embed((columns * 5 + 1) % backbone.vocab_size).repeat(2, 1, 1)
    stretched[:, places] = embeddings
    seen = columns[None, :] <= columns[:, None]
    hidden = torch.ones_like(seen[0]).index_fill(0, places, False)
    allowed = (seen & ~hidden) | torch.eye(n + 2, dtype=torch.bool, device=row.device)
    mask = additive_mask(allowed.expand(2, -1, -1), embeddings.dtype)
    padded = backbone.hidden(stretched, mask, positions)[:, places]
    remedy = "Models whose attention counts columns (ALiBi) are not supported."
    for b, how in enumerate(("compact", "stretched")):
        rule = f"position_ids and a 4-D mask must decide what a unit sees ({how} positions)"
        _same(backbone, rule, padded[b], apart[b], remedy)


def _check_cache(backbone: Backbone, row: Tensor, short: Tensor, plain: Tensor) -> None:
    n, m = row.shape[1], short.shape[1]
    alone = backbone.hidden(backbone.embed(short))
    ids = torch.cat([row, torch.cat([short, row[:, : n - m]], dim=1)])
    cache = RowCache(backbone.model.config.num_hidden_layers, 2, n + 1, backbone.device)
    first = _cached(backbone, ids, cache)
    cache.commit(torch.tensor([n, m]))
    cache.rollback(torch.tensor([2, 1]))
    second = _cached(backbone, torch.stack([row[0, n - 2 : n - 1], short[0, m - 1 :]]), cache)
    rule = "rows of different lengths must be exact together"
    remedy = "This architecture mixes rows and is not supported."
    _same(backbone, rule, first[0], plain[0], remedy)
    _same(backbone, rule, first[1, :m], alone[0], remedy)
    rule = "a cache must go on after units were taken back"
    remedy = "This architecture keeps more than keys and values and is not supported."
    _same(backbone, rule, second[0], plain[0, n - 2 : n - 1], remedy)
    _same(backbone, rule, second[1], alone[0, m - 1 :], remedy)


def _cached(backbone: Backbone, ids: Tensor, cache: RowCache) -> Tensor:
    cache.begin(ids.shape[1])
    return backbone.on_cache(backbone.embed(ids), cache)


def state_tolerance(backbone: Backbone) -> float:
    return _TOLERANCE.get(backbone.dtype, max(_TOLERANCE.values()))


def state_difference(states: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, of the norm of what is expected."""
    wide = expected.detach().cpu().double()
    return float((states.detach().cpu().double() - wide).norm()) / max(float(wide.norm()), 1e-30)


def _same(backbone: Backbone, rule: str, states: Tensor, expected: Tensor, remedy: str) -> None:
    off = state_difference(states, expected) if states.shape == expected.shape else float("inf")
    equal = off <= state_tolerance(backbone)  # NaN is refused, too
    _require(backbone, equal, rule, f"off by {off:.2g} of the norm", remedy)


def _require(backbone: Backbone, ok: bool, rule: str, value: str, remedy: str) -> None:
    require(ok, BackboneError, rule, f"{type(backbone.model).__name__}: {value}", remedy)


@contextmanager
def typed_failures(
    backbone: Backbone, rule: str, remedy: str = "This architecture is not supported."
) -> Iterator[None]:
    try:
        yield
    except (BackboneError, torch.OutOfMemoryError):
        raise
    except (UmimError, *FOREIGN_ERRORS) as error:
        reason = error.value if isinstance(error, UmimError) else first_line(error)
        value = f"{type(backbone.model).__name__}: {reason}"
        raise BackboneError(rule, value, remedy) from error
