"""Frozen language model that reads units: backbone, merge module, matcher and positions.

Without rules it is the base model: ``merged_model.base()``.

Shapes: B rows, S units of the longest row, M spans, N tokens of the longest span, d embedding size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umim_core.backbone.backbone import Backbone
from umim_core.config.form import (
    PAPER_FORM,
    Merge,
    ModuleForm,
    UnitPositions,
    check_merge,
    check_raw_tail,
)
from umim_core.errors import ConfigError, require
from umim_core.merging.merged_trunk import MergedTrunk, merge_states, span_places, unit_states
from umim_core.merging.module import MergeModule
from umim_core.merging.packing import (
    PackedUnits,
    Segmentation,
    Segmenter,
    SpanMerger,
    pack_rows,
)
from umim_core.rules.grams import LONGEST
from umim_core.rules.matcher import Matcher, Parts, segment_parts
from umim_core.text.token_ids import Ints


@dataclass(frozen=True)
class MergedModel:
    """A frozen backbone with its merge module and its rules.

    Attributes:
        backbone: The frozen model.
        module: Makes surrogates; None only without rules.
        matcher: The rules; None keeps every token.
        raw_tail: Last tokens of a prompt or context that stay raw. A text that is scored as a whole
            has no prompt, hence no raw tail.
        decode_max_damage: Most price of the rules that generated tokens merge by; None for all
            rules. Prompts, contexts and scored texts merge by all.
        parts: The layers below and from the merge depth on; made of the others if left out.
    """

    backbone: Backbone
    module: SpanMerger | None
    matcher: Segmenter | None
    raw_tail: int = 0
    decode_max_damage: float | None = None
    parts: MergedTrunk | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        module = self._trained
        made_of = (self.backbone, self.merge_depth, None if module is None else module.adapters)
        # a copy with other rules has the same parts
        if self.parts is None or any(
            a is not b for a, b in zip(self.parts.of_parts, made_of, strict=True)
        ):
            object.__setattr__(self, "parts", MergedTrunk.of(*made_of))
        ruled = isinstance(self.matcher, Matcher) and len(self.matcher.rules)
        rule, remedy = "rules need a merge module", "Pass one, or no rules."
        require(not ruled or self.module is not None, ConfigError, rule, None, remedy)
        if module is not None:
            rule = f"rules must have at most {module.longest} tokens, as those of the module"
            remedy = "Train a checkpoint with these rules."
            require(self.longest <= module.longest, ConfigError, rule, self.longest, remedy)

    @property
    def _trained(self) -> MergeModule | None:
        """The module; None where a function without weights stands in its place."""
        return self.module if isinstance(self.module, MergeModule) else None

    @property
    def _form(self) -> ModuleForm:
        return PAPER_FORM if self._trained is None else self._trained.form

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
        assert self.parts is not None  # noqa: S101  made where it was left out
        return self.parts

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
        if (module := self._trained) is None:
            found = type(self.module).__name__
            raise ConfigError("a merge module is needed", found, "Pass a MergeModule.")
        return module

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
        spans, module = self.backbone.embed(span_ids), self._trained
        if module is None:
            return self.module(spans, span_lengths).to(self.backbone.dtype)
        pooled: Tensor = module(spans, span_lengths, span_ids)
        return pooled.to(self.backbone.dtype)

    def states_of(self, ids: Tensor, states: Tensor, ends: Tensor, lengths: Tensor) -> Tensor:
        """Return the states [B, S, d] of units of raw ids [B, T] (int64) that end at some tokens.

        ``states`` are those of the tokens before the merge depth [B, T, d], ``ends`` [B, S] (int64)
        the token that each unit ends with, ``lengths`` [B, S] (int64) its tokens; padding, of 0,
        has any state.
        """
        rows = torch.arange(len(ids), device=ids.device)[:, None] * ids.shape[1]
        flat = unit_states(
            self._trained,
            states.flatten(0, 1),
            ids.reshape(-1),
            (rows + ends).reshape(-1),
            lengths.reshape(-1),
        )
        return flat.view(*ends.shape, -1)

    def merge_states(self, window: Tensor, ids: Tensor, lengths: NDArray[np.int64]) -> Tensor:
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
