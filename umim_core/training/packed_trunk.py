"""Forward pass of a backbone's blocks over rows of different lengths, on a CPU without padding.

The products of all blocks see one long row of real units; attention takes the rows apart::

    rows  a1 a2 a3 | b1 | c1 c2      products  [1, 6, d]      attention  [1, 3] [1, 1] [1, 2]

Attention of a row is the backbone's own sdpa attention, causal and without a mask, so that a row
gets what it would get alone (``OwnAttention``); backbones that do not look attention up in
transformers' table, or whose windows are shorter than a row, are padded.
On a GPU all are (H100, shape of SmolLM2, a step of 32 rows: 0.33 s padded, 0.61 s apart with flash
attention; cuDNN, which torch prefers, plans attention anew for every length and is far slower).

Shapes: N units of all rows, B rows, S units of the longest row, d embedding size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from umim_core.backbone.attention_masks import OwnAttention
from umim_core.backbone.backbone import Backbone
from umim_core.merging.adapters import merged_rows

_SDPA: Final = "sdpa"
_ALIKE: Final = 0.1  # of the states' norm; a row that sees another is off by about half of it
_log = logging.getLogger("umim")


@dataclass
class _Rows:
    """Units of the rows under way, and how many layers have taken them apart."""

    lengths: list[int]
    layers: int = 0


class PackedTrunk:
    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._blocks: int = backbone.model.config.num_hidden_layers
        self._longest = self._longest_packed_row()
        if not self._longest:
            _log.info("umim: rows of different lengths are padded for %s", backbone.name)

    def hidden(
        self,
        units: Tensor,
        lengths: Sequence[int],
        positions: Tensor | None = None,
        merged: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states after the final norm [N, d] of all rows, one after the other [N, d].

        ``lengths`` are the units per row [B], at least 1 each; they add up to N. Positions [N]
        (int64) are 0, 1, .. in every row if None; adapters act on units that are ``merged`` [N]
        (bool).
        """
        if len(set(lengths)) == 1 or max(lengths) > self._longest:
            return self._padded(units, lengths, positions, merged)
        if positions is None:
            positions = _real_units(lengths).nonzero()[:, 1].to(units.device)
        by_row = _BY_ROW.given(self._backbone.model, _Rows(list(lengths)))
        with merged_rows(None if merged is None else merged.nonzero().view(-1)), by_row:
            return self._backbone.hidden(units[None], position_ids=positions[None])[0]

    def _padded(
        self,
        units: Tensor,
        lengths: Sequence[int],
        positions: Tensor | None,
        merged: Tensor | None = None,
    ) -> Tensor:
        """Pad rows on the right: attention is causal, so no unit sees padding."""
        real = _real_units(lengths)
        index = real.view(-1).nonzero().view(-1).to(units.device)
        padded = units.new_zeros(real.numel(), units.shape[-1]).index_copy(0, index, units)
        if positions is not None:
            positions = positions.new_zeros(real.numel()).index_copy(0, index, positions)
            positions = positions.view(real.shape)
        with merged_rows(None if merged is None else index[merged]):
            hidden = self._backbone.hidden(padded.view(*real.shape, -1), position_ids=positions)
        return hidden.flatten(0, 1)[index]

    @torch.no_grad()
    def _longest_packed_row(self) -> int:
        """Return the longest row that is packed, 0 on a GPU or if rows cannot be taken apart."""
        model, lengths = self._backbone.model, (2, 3)
        if self._backbone.device.type != "cpu":
            return 0
        if model.config._attn_implementation != _SDPA or not model._can_set_attn_implementation():
            return 0
        window = self._backbone.window
        units = self._backbone.embed(torch.arange(5, device=self._backbone.device) % 2)
        positions = torch.tensor([0, 1, 0, 1, 2], device=units.device)
        with _BY_ROW.given(model, _Rows(list(lengths))) as rows:
            apart = self._backbone.hidden(units[None], position_ids=positions[None])[0].float()
        alone = self._padded(units, lengths, None).float()
        taken_apart = rows.layers == self._blocks
        if not taken_apart or (apart - alone).norm() > _ALIKE * alone.norm():
            return 0
        return torch.iinfo(torch.int64).max if window is None else window


def _real_units(lengths: Sequence[int]) -> Tensor:
    """Return where rows of these lengths have units [B, S] (bool), on the CPU."""
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def _attend_by_row(
    rows: _Rows, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    """Attend within rows: query [1, H, N, Dh], key and value [1, Hkv, N, Dh] -> [1, N, H, Dh]."""
    rows.layers += 1
    parts = zip(*(torch.split(x, rows.lengths, dim=2) for x in (query, key, value)), strict=True)
    outputs = [sdpa_attention_forward(module, q, k, v, None, **options)[0] for q, k, v in parts]
    return torch.cat(outputs, dim=1)


_BY_ROW: Final = OwnAttention[_Rows]("umim_rows", _attend_by_row)
