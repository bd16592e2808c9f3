"""The trunk that reads merged units: two parts of a backbone, with adapters on the second.

At merge depth k the first k layers read every token; then a span becomes one state, to which the
module adds, and the other layers read one state per unit::

    tokens   x1  x2 x3  x4          layers < k, at positions 0 1 2 3
    states   h1  h2 h3  h4          before layer k
    units    h1    u    h4          u = h3 + rms(h3) g module(h2 / rms(h2), h3 / rms(h3))
                                    layers >= k, at positions 0 2 3

g is the gain of the module's last norm, zero at the start. Depth 0 is the paper's form: a unit is
made of embeddings, by its ids alone.

Shapes: B rows, T raw tokens, S units, N tokens of the longest span, M merged units, d embedding
size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.split import split_backbone
from umim_core.merging.adapters import SpanAdapters, adapted, merged_rows
from umim_core.merging.forms.span_ops import inside_spans
from umim_core.merging.module import MergeModule


@dataclass(frozen=True)
class MergedTrunk:
    """The layers that read raw tokens, and those that read units.

    Attributes:
        lower: Layers below the merge depth; None at depth 0.
        upper: The other layers, with adapters if there are any; without merged units they are those
            of the backbone.
        of_parts: Backbone, depth and adapters that it was made of.
    """

    lower: Backbone | None = field(repr=False)
    upper: Backbone = field(repr=False)
    of_parts: tuple[Backbone, int, SpanAdapters | None] = field(repr=False)

    @classmethod
    def of(cls, backbone: Backbone, depth: int, adapters: SpanAdapters | None) -> Self:
        """Take a backbone apart at merge depth k, 0 .. L-1; adapters are of layers k .. L-1."""
        lower, upper = split_backbone(backbone, depth) if depth else (None, backbone)
        upper = upper if adapters is None else adapted(upper, adapters)
        return cls(lower, upper, (backbone, depth, adapters))

    def raw_states(
        self, ids: Tensor, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Return the states [B, T, d] of raw ids [B, T] before the merge depth."""
        embeddings = self.upper.embed(ids)
        return embeddings if self.lower is None else self.lower.hidden(embeddings, mask, positions)

    def hidden(
        self,
        units: Tensor,
        merged: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states after the final norm [B, S, d].

        ``units`` are states before the merge depth [B, S, d], of which some are ``merged`` [B, S]
        (bool); mask and positions are as in ``Backbone.hidden``.
        """
        with self.adapting(merged):
            return self.upper.hidden(units, mask, positions)

    @contextmanager
    def adapting(self, merged: Tensor) -> Iterator[None]:
        """Adapt merged units [B, S] (bool, on any device) of the forwards within."""
        if self.of_parts[2] is None:  # nothing waits for the device then
            yield
            return
        rows = merged.reshape(-1).nonzero().view(-1)
        with merged_rows(rows.to(self.upper.device)):
            yield


def root_mean_square(states: Tensor) -> Tensor:
    """Return the root mean square of states [.., d]: [.., 1], above zero."""
    return states.pow(2).mean(dim=-1, keepdim=True).add(1e-12).sqrt()


def span_places(ends: Tensor, lengths: Tensor) -> Tensor:
    """Return the places [M, N] of the tokens of spans that end at ``ends`` [M] (int64).

    Behind a span's end stands its last token again.
    """
    width = int(lengths.max()) if len(lengths) else 1
    first = ends - lengths + 1
    offsets = torch.arange(width, device=ends.device)
    return torch.minimum(first[:, None] + offsets, ends[:, None])


def merge_states(module: MergeModule, states: Tensor, lengths: Tensor, ids: Tensor) -> Tensor:
    """Return the states [M, d] of units, merged of those of their tokens before the merge depth.

    The module adds to a span's last state, at that state's scale. What stands beyond a span in
    ``states`` [M, N, d] has no influence; rule rows are found by the token ids [M, N] (int64).
    """
    wide = states.to(torch.promote_types(states.dtype, module.dtype))
    last = wide[torch.arange(len(wide), device=wide.device), lengths - 1]
    outside = ~inside_spans(lengths, states.shape[1])
    tokens = (wide / root_mean_square(wide)).to(module.dtype).masked_fill(outside[..., None], 0.0)
    added = module.add_rows(module.merge(tokens, lengths), ids, lengths)
    return (last + root_mean_square(last) * added).to(states.dtype)


def unit_states(
    module: MergeModule | None, states: Tensor, ids: Tensor, ends: Tensor, lengths: Tensor
) -> Tensor:
    """Return the states of units [S, d], given those of all tokens before the merge depth [N, d].

    ``ids`` [N] (int64) are those of the tokens, row after row; a unit of ``lengths`` [S] (int64)
    tokens ends at the place ``ends`` [S] (int64) among them. No module: no unit is merged.
    """
    units = states[ends]
    merged = (lengths > 1).nonzero().view(-1)
    if not len(merged) or module is None:
        return units
    places = span_places(ends[merged], lengths[merged])
    pooled = merge_states(module, states[places], lengths[merged], ids[places])
    return units.index_copy(0, merged, pooled)
