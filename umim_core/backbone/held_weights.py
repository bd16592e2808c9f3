"""Weights of a backbone held in bfloat16, as autocast would cast them before every product.

Autocast keeps a cast of weights that are trained; those of a frozen backbone it casts anew in the
forward passes of teacher and student, micro-batch after micro-batch. Held casts give the same bits.
They are for products only: nothing trains, saves or fingerprints them.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.model_files import frozen_twin

_log = logging.getLogger("umim")


def with_held_weights(backbone: Backbone) -> Backbone:
    """Return a backbone whose linear layers hold bfloat16 weights, for use under autocast.

    Args:
        backbone: It stays as it is, and shares every other weight. Half of its trunk's size in
            float32 is held in addition.

    Returns:
        A twin with the same states under autocast, which is tried once, on two tokens; the backbone
        itself where its weights are not float32 or the states would differ.
    """
    if backbone.dtype is not torch.float32:
        return backbone
    model = frozen_twin(backbone.model)
    for layer in model.base_model.modules():
        if type(layer) in (nn.Linear, Conv1D):
            for name, weight in list(layer.named_parameters(recurse=False)):
                half = nn.Parameter(weight.to(torch.bfloat16), requires_grad=False)
                layer.register_parameter(name, half)
    twin = replace(backbone, model=model, trunk=model.base_model)
    if _gives_the_same_states(twin, backbone):
        return twin
    _log.info("umim: weights are cast for every product of %s", backbone.name)
    return backbone


@torch.no_grad()
def _gives_the_same_states(twin: Backbone, backbone: Backbone) -> bool:
    """Try whether no layer reads its weights otherwise than through a product under autocast."""
    units = backbone.embed(torch.arange(2, device=backbone.device))[None]
    expected = _states(backbone, units)
    try:
        return torch.equal(_states(twin, units), expected)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # products of two types, where a layer turns autocast off
        return False


def _states(backbone: Backbone, units: Tensor) -> Tensor:
    with torch.autocast(backbone.device.type, dtype=torch.bfloat16):
        return backbone.hidden(units)
