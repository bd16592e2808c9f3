"""Frozen language model that reads units: backbone, merge module, matcher and positions.

Without rules it is the base model: ``merged_model.base()``. At merge depth k the first k layers
read every token; then a span becomes one state, to which the module adds, and the other layers,
which may have adapters, read one state per unit::

    tokens   x1  x2 x3  x4          layers < k, at positions 0 1 2 3
    states   h1  h2 h3  h4          before layer k
    units    h1    u    h4          u = h3 + rms(h3) g module(h2 / rms(h2), h3 / rms(h3))
                                    layers >= k, at positions 0 2 3

g is the gain of the module's last norm, zero at the start. Depth 0 is the paper's form: a unit is
made of embeddings, by its ids alone.

Shapes: B rows, T raw tokens, S units of the longest row, M spans, N tokens of the longest span, W
tokens of a window, d embedding size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.split import split_backbone
from umim_core.config.form import (
    PAPER_FORM,
    Merge,
    ModuleForm,
    UnitPositions,
    check_merge,
    check_raw_tail,
)
from umim_core.errors import ConfigError, require
from umim_core.merging.adapters import SpanAdapters, adapted, merged_rows
from umim_core.merging.module import MergeModule, SpanMerger
from umim_core.merging.packing import (
    PackedUnits,
    Segmentation,
    Segmenter,
    inside_spans,
    pack_rows,
)
from umim_core.rules.grams import LONGEST
from umim_core.rules.matcher import Matcher, Parts, segment_parts
from umim_core.text.token_ids import Ints


@dataclass(frozen=True)
class MergedTrunk:
    """The layers that read raw tokens, and those that read units.

    Attributes:
        lower: Layers below the merge depth; None at depth 0.
        upper: The other layers, with adapters if there are any; without merged units they are those
            of the backbone.
        made_of: Backbone, depth and adapters.
    """

    lower: Backbone | None = field(repr=False)
    upper: Backbone = field(repr=False)
    made_of: tuple[Backbone, int, SpanAdapters | None] = field(repr=False)

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
        if self.made_of[2] is None:  # nothing waits for the device then
            yield
            return
        rows = merged.reshape(-1).nonzero().view(-1)
        with merged_rows(rows.to(self.upper.device)):
            yield


@dataclass(frozen=True)
class MergedModel:
    """A frozen backbone with its merge module and its rules.

    Attributes:
        backbone: The frozen model.
        module: Makes surrogates, trained or a baseline's pooling; None only without rules.
        matcher: The rules; None keeps every token.
        raw_tail: Last tokens of a prompt or context that stay raw. A text that is scored as a whole
            has no prompt, hence no raw tail.
        decode_max_damage: Most price of the rules that generated tokens merge by; None for all
            rules. Prompts, contexts and scored texts merge by all.
    """

    backbone: Backbone
    module: SpanMerger | None
    matcher: Segmenter | None
    raw_tail: int = 0
    decode_max_damage: float | None = None
    _trunk: MergedTrunk | None = field(default=None, repr=False)  # of the model this is a copy of

    def __post_init__(self) -> None:
        adapters = None if self.module is None else self.module.adapters
        made_of = (self.backbone, self.merge_depth, adapters)
        # a copy with other rules has the same trunk
        if self._trunk is None or any(
            a is not b for a, b in zip(self._trunk.made_of, made_of, strict=True)
        ):
            object.__setattr__(self, "_trunk", MergedTrunk.of(*made_of))
        ruled = isinstance(self.matcher, Matcher) and len(self.matcher.rules)
        rule, remedy = "rules need a merge module", "Pass one, or no rules."
        require(not ruled or self.module is not None, ConfigError, rule, None, remedy)
        if self.module is not None:
            rule = f"rules must have at most {self.module.longest} tokens, as those of the module"
            remedy = "Train a checkpoint with these rules."
            require(self.longest <= self.module.longest, ConfigError, rule, self.longest, remedy)

    @property
    def _form(self) -> ModuleForm:
        return PAPER_FORM if self.module is None else self.module.form

    @property
    def unit_positions(self) -> UnitPositions:
        """Positions of units in the backbone, as the module was trained."""
        return self._form.unit_positions

    @property
    def merge_depth(self) -> int:
        """Layers that read every token before spans merge, as the module was trained."""
        return self._form.merge_depth

    @property
    def longest(self) -> int:
        """Most tokens of a unit."""
        return self.matcher.rules.longest if isinstance(self.matcher, Matcher) else LONGEST

    @property
    def saved_share(self) -> float:
        """Share (L - k) / L of a token's computation that merging it saves.

        Layers below the merge depth k read every token; a dropped token saves all L layers.
        """
        layers = self.backbone.num_layers
        return (layers - self.merge_depth) / layers

    @property
    def trunk(self) -> MergedTrunk:
        """The layers below the merge depth, and those from it on."""
        assert self._trunk is not None  # noqa: S101  made where it was left out
        return self._trunk

    @classmethod
    def without_merging(cls, backbone: Backbone) -> MergedModel:
        return cls(backbone, None, None)

    def base(self) -> MergedModel:
        return MergedModel.without_merging(self.backbone)

    def merging_by(self, matcher: Matcher) -> MergedModel:
        """Return the model with other rules; its bound on damage is one on its own rules alone."""
        if matcher is self.matcher:
            return self
        return replace(self, matcher=matcher, decode_max_damage=None)

    def reading(self, merge: Merge, raw_tail: int = 0) -> MergedModel:
        check_merge(merge)
        check_raw_tail(raw_tail, merge)
        return self.base() if merge == "none" else replace(self, raw_tail=raw_tail)

    def require_module(self) -> MergeModule:
        if not isinstance(self.module, MergeModule):
            found = type(self.module).__name__
            raise ConfigError("a merge module is needed", found, "Pass a MergeModule.")
        return self.module

    def require_matcher(self) -> Matcher:
        if not isinstance(self.matcher, Matcher):
            raise ConfigError("rules are needed", type(self.matcher).__name__, "Pass a matcher.")
        return self.matcher

    def segment(
        self, ids: NDArray[np.integer], parts: Parts | None = None, raw_tail: int = 0
    ) -> Segmentation:
        """Cut raw ids [T] into units: their starts [S] and lengths [S].

        Rules apply to each of ``parts`` on its own, None for everywhere, but for its raw tail.
        """
        if self.matcher is None:
            return np.arange(len(ids), dtype=np.int64), np.ones(len(ids), dtype=np.int64)
        return segment_parts(self.matcher.segment, ids, parts, raw_tail)

    def segment_prompt(self, ids: NDArray[np.integer], parts: Parts | None = None) -> Segmentation:
        """Cut a prompt into units, of which the last tokens stay raw; see ``segment``."""
        return self.segment(ids, parts, self.raw_tail)

    def positions_from(self, starts: Ints, raw: int, units: int) -> Ints:
        """Return the positions [S] that a sequence takes if it begins at each of its units.

        They start at raw tokens [S]; the whole has so many raw tokens and units.
        """
        return units - np.arange(len(starts)) if self.unit_positions == "compact" else raw - starts

    def pack(
        self,
        rows: Sequence[NDArray[np.integer]],
        parts: Sequence[Parts | None] | None = None,
        raw_tail: int = 0,
    ) -> PackedUnits:
        """Cut rows of raw ids [T_b] into units, as tensors on the backbone's device."""
        pairs = zip(rows, parts or [None] * len(rows), strict=True)
        cuts = [self.segment(ids, row_parts, raw_tail) for ids, row_parts in pairs]
        return pack_rows(rows, cuts, device=self.backbone.device)

    def surrogates(self, span_ids: Tensor, span_lengths: Tensor) -> Tensor:
        """Return the surrogates [M, d] of spans [M, N] in the backbone's data type."""
        rule, value = "a span has a surrogate at merge depth 0 alone", f"depth {self.merge_depth}"
        remedy = "Its state depends on what stands before it; use a checkpoint of depth 0."
        require(not self.merge_depth, ConfigError, rule, value, remedy)
        if self.module is None:
            raise ConfigError("merged units need a merge module", None, "Pass one, or no rules.")
        pooled: Tensor = self.module(self.backbone.embed(span_ids), span_lengths, span_ids)
        return pooled.to(self.backbone.dtype)

    def states_of(self, ids: Tensor, states: Tensor, ends: Tensor, lengths: Tensor) -> Tensor:
        """Return the states [B, S, d] of units of raw ids [B, T] (int64) that end at some tokens.

        ``states`` are those of the tokens before the merge depth [B, T, d], ``ends`` [B, S] (int64)
        the token that each unit ends with, ``lengths`` [B, S] (int64) its tokens; padding, of 0,
        has any state.
        """
        rows = torch.arange(len(ids), device=ids.device)[:, None] * ids.shape[1]
        flat = unit_states(
            self.require_module(),
            states.flatten(0, 1),
            ids.reshape(-1),
            (rows + ends).reshape(-1),
            lengths.reshape(-1),
        )
        return flat.view(*ends.shape, -1)

    def newest_states(self, window: Tensor, ids: Tensor, lengths: NDArray[np.int64]) -> Tensor:
        """Return the states [M, d] of units that end with the last of W tokens.

        ``window`` has the states of the tokens before the merge depth [M, W, d], ``ids`` those of
        each unit [M, W] (int64), zero behind its end.
        """
        sizes = torch.from_numpy(lengths).to(window.device)
        ends = torch.full_like(sizes, window.shape[1] - 1)
        width = int(lengths.max())
        rows = torch.arange(len(window), device=window.device)[:, None]
        places = span_places(ends, sizes)
        return merge_states(self.require_module(), window[rows, places], sizes, ids[:, :width])

    def embed(self, packed: PackedUnits) -> Tensor:
        """Return the embeddings of all units [B, S, d]; padding gets the embedding of id 0."""
        embeddings = self.backbone.embed(packed.token_ids)
        if not len(packed.span_ids):
            return embeddings
        pooled = self.surrogates(packed.span_ids, packed.span_lengths)
        surrogates = pooled[packed.span_index[packed.merged]].to(embeddings.dtype)
        return embeddings.masked_scatter(packed.merged[..., None], surrogates)


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
    module: MergeModule, states: Tensor, ids: Tensor, ends: Tensor, lengths: Tensor
) -> Tensor:
    """Return the states of units [S, d], given those of all tokens before the merge depth [N, d].

    ``ids`` [N] (int64) are those of the tokens, row after row; a unit of ``lengths`` [S] (int64)
    tokens ends at the place ``ends`` [S] (int64) among them.
    """
    units = states[ends]
    merged = (lengths > 1).nonzero().view(-1)
    if not len(merged):
        return units
    places = span_places(ends[merged], lengths[merged])
    pooled = merge_states(module, states[places], lengths[merged], ids[places])
    return units.index_copy(0, merged, pooled)


class SpanCache:
    """Look surrogates up by the ids of their spans; the module's weights must not change any more.

    While decoding a row merges one span at a time, often one it has seen before; each is computed
    alone and kept, so that what a request gets depends neither on the other rows nor on the
    requests before it. The newest ``kept_spans`` are kept, at least 1.
    """

    def __init__(self, merged_model: MergedModel, kept_spans: int = 4096) -> None:
        self._merged_model, self._device = merged_model, merged_model.backbone.device
        self._kept_spans = kept_spans
        self._surrogates: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        self._lock = Lock()  # a served model answers several requests at once

    def find(self, spans: Sequence[tuple[int, ...]]) -> Tensor:
        """Return the surrogates [M, d] of spans of ids, from those kept where possible.

        They have the backbone's data type; a caller's autocast does not count, as they are kept.
        """
        with self._lock, torch.autocast(self._device.type, enabled=False):
            return torch.stack([self._find(span) for span in spans])

    def _find(self, span: tuple[int, ...]) -> Tensor:
        if span not in self._surrogates:
            ids, size = (torch.tensor([x], device=self._device) for x in (span, len(span)))
            self._surrogates[span] = self._merged_model.surrogates(ids, size)[0]
            if len(self._surrogates) > self._kept_spans:
                self._surrogates.popitem(last=False)
        self._surrogates.move_to_end(span)
        return self._surrogates[span]
