"""A frozen twin of a model: the same weights in memory, with switches of its own."""

from __future__ import annotations

from copy import deepcopy

from torch import nn
from transformers import PreTrainedModel


def frozen_twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model that shares the weights, needs no gradients and is in evaluation mode.

    The model itself stays as it is: its mode, what of it is trained, and its configuration. No
    weight is copied, so a step that trains the model changes the twin.

    Args:
        model: Any transformers model.
    """
    shared: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        # Quantised weights have classes of their own, and none of them is trained.
        own = type(parameter) is nn.Parameter and parameter.requires_grad
        shared[id(parameter)] = (
            nn.Parameter(parameter.detach(), requires_grad=False) if own else parameter
        )
    twin: PreTrainedModel = deepcopy(model, shared)
    return freeze(twin)


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """Put a model of our own into evaluation mode and let none of its weights need a gradient."""
    model.train(False).requires_grad_(False)
    return model
