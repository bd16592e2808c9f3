"""Gated adapters: low-rank additions to a trunk's linear maps, at merged units alone.

    y = W x + [x belongs to a merged unit] (x A) B        A [in, r], B [r, out], B zero at the start

The gate is exact: rows of raw tokens never touch A and B, so they have the bits of the base model.
Merged units are a tenth of the rows: they are gathered, pass two thin products, and are added.

The adapted trunk is a twin that shares the backbone's weights; the backbone itself has no hooks and
no other modules. Which rows are merged travels in a context variable, so threads do not meet.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (2021); the gate is ours.

Shapes: N units of all rows of a forward, M of them merged, r rank, K adapted layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.model_files import frozen_twin
from umim_core.backbone.split import layer_list
from umim_core.errors import BackboneError, require
from umim_core.merging.low_rank_rows import add_low_rank

_merged: ContextVar[Tensor | None] = ContextVar("merged", default=None)
_LINEAR: Final = (nn.Linear, Conv1D)
# Up to so many rows one thread is as fast as torch with any number, by figures of one and two.
_FEW: Final = 64


class SpanAdapters(nn.Module):
    """The trained matrices of all adapted layers, a pair per linear map of a layer.

    Attributes:
        down: A of each map, all layers in one [K, in, r]; names have ``-`` for ``.``.
        up: B likewise [K, r, out].
    """

    def __init__(self, sizes: dict[str, tuple[int, int]], layers: int, rank: int) -> None:
        super().__init__()
        self.rank, self.layers = rank, layers
        self.down = nn.ParameterDict(
            {name: nn.Parameter(torch.empty(layers, n, rank)) for name, (n, _) in sizes.items()}
        )
        self.up = nn.ParameterDict(
            {name: nn.Parameter(torch.zeros(layers, rank, n)) for name, (_, n) in sizes.items()}
        )

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Draw A from N(0, 1 / in), map after map by name; B is zero."""
        for name, down in sorted(self.down.items()):
            down.normal_(0.0, 1.0 / math.sqrt(down.shape[1]), generator=generator)
            self.up[name].zero_()


class _AdaptedLinear(nn.Module):
    """A frozen linear map with its addition at merged rows.

    The adapters are held outside of the modules: the twin is frozen, they are trained.
    """

    def __init__(self, linear: nn.Module, adapters: SpanAdapters, name: str, layer: int) -> None:
        super().__init__()
        self.linear = linear
        key = name.replace(".", "-")
        self._pair = (adapters.down[key], adapters.up[key])  # in a tuple: not the module's own
        self._layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        rows = _merged.get()
        if rows is None:
            return out
        down, up = (matrices[self._layer] for matrices in self._pair)
        # In place: nobody else holds the output yet. A view: a copy would lose the addition.
        flat, inputs = out.view(-1, out.shape[-1]), x.flatten(0, -2)
        both = x.dtype == out.dtype == torch.bfloat16  # autocast reads float32
        serial = len(rows) <= _FEW or torch.get_num_threads() <= 2
        if both and serial and out.device.type == "cpu" and not torch.is_grad_enabled():
            add_low_rank(flat, inputs, rows, down, up)
            return out
        added = (inputs.index_select(0, rows) @ down.to(x.dtype)) @ up.to(x.dtype)
        flat.index_add_(0, rows, added.to(out.dtype))
        return out


@contextmanager
def merged_rows(rows: Tensor | None) -> Iterator[None]:
    """Adapt merged units of the forwards within; None adapts nothing.

    Their places [M] (int64) are among all units of a forward, row after row.
    """
    token = _merged.set(rows if rows is not None and len(rows) else None)
    try:
        yield
    finally:
        _merged.reset(token)


def linear_maps(backbone: Backbone) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the linear maps of a layer, the same in every layer.

    Names have ``-`` for ``.``.
    """
    holder, name = layer_list(backbone.model)
    sizes_by_layer = [
        {n.replace(".", "-"): _size(m) for n, m in layer.named_modules() if isinstance(m, _LINEAR)}
        for layer in getattr(holder, name)
    ]
    require(
        bool(sizes_by_layer[0]) and all(sizes == sizes_by_layer[0] for sizes in sizes_by_layer),
        BackboneError,
        "layers that take adapters must have the same linear maps",
        type(backbone.model).__name__,
        "Use this architecture without adapters (adapter_rank 0).",
    )
    return sizes_by_layer[0]


def _size(linear: nn.Module) -> tuple[int, int]:
    if isinstance(linear, Conv1D):
        return int(linear.nx), int(linear.nf)
    outputs, inputs = linear.get_parameter("weight").shape
    return inputs, outputs


def adapted(backbone: Backbone, adapters: SpanAdapters) -> Backbone:
    sizes, up = linear_maps(backbone), adapters.up
    trained = {name: (a.shape[1], up[name].shape[2]) for name, a in adapters.down.items()}
    require(
        sizes == trained and adapters.layers == backbone.num_layers,
        BackboneError,
        "adapters must be of the backbone's linear maps",
        f"{adapters.layers} layers {trained}, the backbone has {backbone.num_layers} {sizes}",
        "Load the backbone that they were trained for.",
    )
    model = frozen_twin(backbone.model)
    holder, place = layer_list(model)
    for number, layer in enumerate(getattr(holder, place)):
        maps = [(n, m) for n, m in layer.named_modules() if isinstance(m, _LINEAR)]
        for name, linear in maps:
            parent, _, leaf = name.rpartition(".")
            wrapped = _AdaptedLinear(linear, adapters, name, number)
            setattr(layer.get_submodule(parent), leaf, wrapped)
    return replace(backbone, model=model)
