"""A backbone in two parts, which share its weights: its first layers, and the others.

    lower    layers 0 .. k-1, no final norm      states [B, T, d] before layer k
    upper    layers k .. L-1 and the final norm  reads such states as if they were embeddings

Each part is a backbone of its own with the same embeddings and head. ``upper`` adds no learned
positions: the states that it reads hold them already. The parts are tried once: one after the other
they must give the states of the whole.

Shapes: B rows, T tokens, d embedding size, L layers.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.model_files import frozen_twin
from umim_core.backbone.trials import state_difference, state_tolerance, typed_failures
from umim_core.errors import BackboneError, ConfigError, require

_TRIED = 5  # tokens of the trial; fewer where the positions end
_DEPTH_0 = "This architecture can be merged at depth 0 only."
_log = logging.getLogger("umim")


class _NoPositions(nn.Module):
    """Takes the place of learned positions: zeros [..., d] for position ids [...]."""

    def __init__(self, like: nn.Embedding) -> None:
        super().__init__()
        self._size, self._dtype = like.embedding_dim, like.weight.dtype

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, self._size, dtype=self._dtype, device=ids.device)


def split_backbone(backbone: Backbone, depth: int) -> tuple[Backbone, Backbone]:
    """Return the layers below ``depth`` (1 .. L-1) and those from it on, as backbones.

    The backbone stays as it is, and no weight is copied.
    """
    layers = backbone.num_layers
    rule = f"a backbone of {layers} layers can be split before layer 1 to {layers - 1}"
    require(0 < depth < layers, ConfigError, rule, depth, "Choose a smaller merge_depth.")
    with typed_failures(backbone, "the layers of a backbone must run in two parts"):
        lower, upper = (layer_range(backbone, *part) for part in ((0, depth), (depth, layers)))
        _check(backbone, lower, upper)
    return lower, upper


def layer_range(backbone: Backbone, first: int, end: int) -> Backbone:
    """Return a twin with the layers ``first`` .. ``end`` - 1 alone, sharing the weights.

    Without the last layer it has no final norm; without layer 0 it adds no learned positions.
    """
    model = frozen_twin(backbone.model)
    holder, name = layer_list(model)
    called = _called(replace(backbone, model=model), holder)
    layers = nn.ModuleList(list(getattr(holder, name))[first:end])
    for module in layers.modules():
        if "layer_idx" in vars(module):  # the place of a layer in its cache
            vars(module)["layer_idx"] -= first
    setattr(holder, name, layers)
    config = model.config
    if (types := config.to_dict().get("layer_types")) is not None:
        config.layer_types = list(types)[first:end]
    config.num_hidden_layers = end - first
    for child in called if first else ():
        if isinstance(module := holder.get_submodule(child), nn.Embedding):
            setattr(holder, child, _NoPositions(module))
    if end < backbone.num_layers:
        setattr(holder, called[-1], nn.Identity())
    return replace(backbone, model=model)


def layer_list(model: PreTrainedModel) -> tuple[nn.Module, str]:
    """Return the module that holds a trunk's layers, and the name that the list has there."""
    layers: int = model.config.num_hidden_layers
    lists = [
        (parent, name)
        for parent in model.base_model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == layers
    ]
    rule = f"the {layers} layers of a backbone must be one list of modules"
    remedy = "This architecture can be merged at depth 0 only, without adapters."
    require(bool(lists), BackboneError, rule, type(model).__name__, remedy)
    return lists[0]  # modules come from the outside in


@torch.no_grad()
def _called(backbone: Backbone, holder: nn.Module) -> list[str]:
    """Return which modules beside the layers a forward on embeddings calls, in order."""
    called: list[str] = []
    embeddings = backbone.embed(torch.zeros(1, 1, dtype=torch.int64, device=backbone.device))
    handles = [
        child.register_forward_hook(lambda *_, name=name: called.append(name))
        for name, child in holder.named_children()
    ]
    try:
        backbone.hidden(embeddings)
    finally:
        for handle in handles:
            handle.remove()
    rule, remedy = "a backbone must have a final norm beside its layers", _DEPTH_0
    require(bool(called), BackboneError, rule, type(backbone.model).__name__, remedy)
    return called


@torch.no_grad()
def _check(backbone: Backbone, lower: Backbone, upper: Backbone) -> None:
    """Refuse parts that do not give the states of the whole, at positions that jump, too."""
    ids = torch.arange(_TRIED, device=backbone.device)[None] % backbone.vocab_size
    most = backbone.max_positions
    step = 2 if most is None or most >= 2 * _TRIED else 1
    positions = torch.arange(_TRIED, device=backbone.device)[None] * step
    embeddings = backbone.embed(ids)
    expected = backbone.hidden(embeddings, position_ids=positions)
    states = lower.hidden(embeddings, position_ids=positions)
    parts = upper.hidden(states, position_ids=positions)
    off = state_difference(parts, expected)
    rule = "the layers of a backbone must read each other's states alone"
    value = f"{type(backbone.model).__name__}: off by {off:.2g} of the norm in two parts"
    require(off <= state_tolerance(backbone), BackboneError, rule, value, _DEPTH_0)


def with_held_weights(backbone: Backbone) -> Backbone:
    """Return a backbone whose linear layers hold bfloat16 weights, for use under autocast.

    The twin has the same states under autocast, which is tried once, on two tokens, and shares
    every other weight; half of its trunk's size in float32 is held in addition. Where the weights
    are not float32 or the states would differ, it is the backbone itself.
    """
    if backbone.dtype is not torch.float32:
        return backbone
    model = frozen_twin(backbone.model)
    for layer in model.base_model.modules():
        if type(layer) in (nn.Linear, Conv1D):
            for name, weight in list(layer.named_parameters(recurse=False)):
                half = nn.Parameter(weight.to(torch.bfloat16), requires_grad=False)
                layer.register_parameter(name, half)
    twin = replace(backbone, model=model)
    if _gives_the_same_states(twin, backbone):
        return twin
    _log.info("umim: weights are cast for every product of %s", backbone.name)
    return backbone


@torch.no_grad()
def _gives_the_same_states(twin: Backbone, backbone: Backbone) -> bool:
    """Try whether no layer reads its weights otherwise than through a product under autocast."""
    units = backbone.embed(torch.arange(2, device=backbone.device))[None]
    with torch.autocast(backbone.device.type, dtype=torch.bfloat16):
        expected = backbone.hidden(units)
        try:
            return torch.equal(twin.hidden(units), expected)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # products of two types, where a layer turns autocast off
            return False
