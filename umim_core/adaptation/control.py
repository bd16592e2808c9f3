"""Controls of task adaptation: the base model with as many trained weights, and nothing merged.

A control learns from the labels that the merge module learns from, has about its number of
parameters, and starts as the base model. What adaptation gains beyond it is the gain of merging, at
a token reduction of 0.

Only the preference loss trains one. The distillation loss of a text without merges is at its least
from the start, where student and teacher are one model.

A control is a file of ``umim_core/adaptation/controls``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import nn
from transformers import PreTrainedModel

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.devices import forked_generators
from umim_core.backbone.model_files import frozen_twin
from umim_core.merging.compressed import Compressed
from umim_core.registry import Registry

Install = Callable[[Backbone], nn.Module]
CONTROLS: Final = Registry[Install]("umim_core.adaptation.controls", "control of adaptation")
"""Functions that put untrained weights into a backbone's model and return the module of just them.

The backbone is a twin that they may change; its weights, which it shares, they leave alone.
"""


@dataclass(frozen=True)
class Control:
    """A control and its weights."""

    kind: str
    module: nn.Module = field(repr=False)
    compressed: Compressed

    @property
    def size(self) -> int:
        """Number of trained parameters."""
        return sum(parameter.numel() for parameter in self.module.parameters())


def fresh_control(kind: str, backbone: Backbone, seed: int) -> Control:
    """Return an untrained control, which computes what the base model computes, bit for bit.

    Raises:
        ConfigError: If there is no such control, or the model has no place for it.
        MissingExtraError: If a library that it needs is not installed.
    """
    install = CONTROLS.find(kind)
    twin = _with_model(backbone, frozen_twin(backbone.model))
    with forked_generators(backbone.device):
        torch.manual_seed(seed)
        module = install(twin).to(backbone.device)
    twin.model.train(False)
    return Control(kind, module, Compressed.without_merging(_with_model(twin, twin.model)))


def merge_module_size(hidden_size: int) -> int:
    """Return the parameters of the paper's merge module, 2 d^2 + 7 d."""
    return 2 * hidden_size**2 + 7 * hidden_size


def _with_model(backbone: Backbone, model: PreTrainedModel) -> Backbone:
    """Return a backbone with another model of the same form, taken apart."""
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # theirs
    return replace(
        backbone,
        model=model,
        embedding=model.get_input_embeddings(),
        trunk=model.base_model,
        projection=head,
    )
