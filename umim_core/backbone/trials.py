"""Trials that a loaded model passes: what the method relies on, and the model's own forward.

Columns are hidden, rows of different lengths share a forward, units are taken back from the cache.
Six forwards of a few units show whether a model does that exactly::

    F1  the model on ids     a0 a1 a2 a3 a4 a5        its head's input, what becomes of its output
    F2  embeddings           positions 0 1 2 ...      equals F1
        and with jumps       positions 0 2 3 5 ..
    F3  columns              a0 x a1 a2 .. x a5       x is hidden by an additive mask; what is left
                                                      equals F2, at its positions
    F4  two rows, cached     a0 .. a5 | b0 .. b3      equals each row alone (F1, F5)
    F5  the short row alone  b0 .. b3
    F6  units taken back     a0 .. a3 + a4 | b0 .. b2 + b3   equals F1 and F5 again

Shapes: n units are tried, d embedding size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from umim_core.backbone.attention_masks import additive_mask
from umim_core.backbone.row_cache import RowCache
from umim_core.backbone.tokenizer_files import FOREIGN_ERRORS, first_line
from umim_core.errors import BackboneError, UmimError, require

if TYPE_CHECKING:
    from umim_core.backbone.backbone import Backbone

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
