"""Surrogates of generated spans, the newest kept.

While decoding a row merges one span at a time, often one it has seen before; each is computed alone
and kept, so that what a request gets depends neither on the other rows nor on the requests before
it.

Shapes: M spans, d embedding size.
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
