"""Surrogates for inference, the newest spans kept.

A prompt's different spans are merged in one pass. While decoding a row merges one span at a time,
often one it has seen before; each is computed alone and kept, so that what a request gets depends
neither on the other rows nor on the requests before it.

Shapes: M spans, N tokens of the longest, d embedding size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

import torch
from torch import Tensor

from umim_core.merging.merged_model import MergedModel


class SpanCache:
    """Look surrogates up by the ids of their spans; the module's weights must not change any more.

    ``kept_spans`` surrogates are kept, at least 1.
    """

    def __init__(self, merged_model: MergedModel, kept_spans: int = 4096) -> None:
        self._merged_model, self._backbone = merged_model, merged_model.backbone
        self._kept_spans = kept_spans
        self._surrogates: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        self._lock = Lock()  # a served model answers several requests at once

    def merge(self, span_ids: Tensor, lengths: Tensor) -> Tensor:
        """Merge different spans of ids [M, N] (int64), zero-padded, with lengths [M] in one pass.

        Surrogates [M, d] have the backbone's data type; a caller's autocast does not count, as
        surrogates are kept.
        """
        with torch.autocast(self._backbone.device.type, enabled=False):
            return self._merged_model.surrogates(span_ids, lengths)

    def find(self, spans: Sequence[tuple[int, ...]]) -> Tensor:
        """Return the surrogates [M, d] of spans of ids, from those kept where possible."""
        with self._lock:
            return torch.stack([self._find(span) for span in spans])

    def _find(self, span: tuple[int, ...]) -> Tensor:
        surrogate = self._surrogates.get(span)
        if surrogate is None:
            device = self._backbone.device
            ids = torch.tensor([span], device=device)
            surrogate = self.merge(ids, torch.tensor([len(span)], device=device))[0]
            self._surrogates[span] = surrogate
            if len(self._surrogates) > self._kept_spans:
                self._surrogates.popitem(last=False)
        else:
            self._surrogates.move_to_end(span)
        return surrogate
