"""Surrogates for inference: tabulated projections for prompts, the newest spans kept for decoding.

A prompt's different spans are merged in one pass. While decoding a row merges one span at a time,
often one it has seen before; each is computed alone and kept, so that what a request gets depends
neither on the other rows nor on the requests before it.

Shapes: M spans, N tokens of the longest, d embedding size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from threading import Lock
from typing import Final

import torch
from torch import Tensor

from umim_core.merging.compressed import Compressed
from umim_core.merging.module import MergeModule
from umim_core.merging.tabulated import TabulatedMerger

# A table of V x d numbers pays on small backbones; of a large one it would cost gigabytes for a
# pass that is a thousandth of the prefill.
_TABLE_BYTES: Final = 256 << 20
_KEPT_SPANS: Final = 4096


class SpanCache:
    """Look surrogates up by the ids of their spans.

    Args:
        compressed: Makes the surrogates; the weights of its module must not change any more.
        table_bytes: Largest table of projections that is made.
        kept_spans: Surrogates that are kept, at least 1.
    """

    def __init__(
        self,
        compressed: Compressed,
        *,
        table_bytes: int = _TABLE_BYTES,
        kept_spans: int = _KEPT_SPANS,
    ) -> None:
        self._compressed, self._backbone = compressed, compressed.backbone
        self._table_bytes, self._kept_spans = table_bytes, kept_spans
        self._kept: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        self._lock = Lock()  # a served model answers several requests at once

    @cached_property
    def table(self) -> TabulatedMerger | None:
        """The tabulated module, made when it is first needed; None where there is no table."""
        module = self._compressed.module
        if not isinstance(module, MergeModule) or not module.table_offsets:
            return None
        numbers = self._backbone.vocab_size * module.hidden_size * module.table_offsets
        if numbers * torch.finfo(module.dtype).bits // 8 > self._table_bytes:
            return None
        return TabulatedMerger.of(module, self._backbone.embedding_table)

    def merge(self, span_ids: Tensor, lengths: Tensor) -> Tensor:
        """Merge different spans in one pass.

        Args:
            span_ids: Token ids [M, N] (int64), zero-padded.
            lengths: Tokens of each span [M] (int64).

        Returns:
            Surrogates [M, d] in the backbone's data type.
        """
        if self.table is None:
            return self._compressed.surrogates(span_ids, lengths)
        return self.table(span_ids, lengths).to(self._backbone.dtype)

    def find(self, spans: Sequence[tuple[int, ...]]) -> Tensor:
        """Return the surrogates [M, d] of spans of ids, from those kept where possible."""
        with self._lock:
            return torch.stack([self._one(span) for span in spans])

    def _one(self, span: tuple[int, ...]) -> Tensor:
        found = self._kept.get(span)
        if found is None:
            device = self._backbone.device
            ids = torch.tensor([span], device=device)
            found = self.merge(ids, torch.tensor([len(span)], device=device))[0]
            self._kept[span] = found
            if len(self._kept) > self._kept_spans:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(span)
        return found
