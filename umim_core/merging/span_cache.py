"""Surrogates for inference: tabulated projections for prompts, the newest spans kept for decoding.

A prompt's different spans are merged in one pass. While decoding a row merges one span at a time,
often one it has seen before; each is computed alone and kept, so that what a request gets depends
neither on the other rows nor on the requests before it.

What a token contributes depends on it alone (on its offset, too, with learned positions and in the
linear form), so it can be computed once per vocabulary entry: a merge is then a lookup, a softmax
and one d x d product, exactly. The table has V x d numbers, times the most tokens of a rule where
offsets count.

Shapes: V vocabulary, O offsets with a table of their own (1, or the most tokens of a rule), M
spans, N tokens of the longest, d embedding size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Final, Self

import torch
from torch import Tensor

from umim_core.errors import ConfigError, require
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule

Embed = Callable[[Tensor], Tensor]  # ids [..] (int64) to embeddings [.., d]


@dataclass(frozen=True)
class TabulatedMerger:
    """Surrogates by token id, without gradients.

    Attributes:
        module: The module whose weights were tabulated; changing them makes the table stale.
        embed: Gives the embeddings of ids, to which a module with a residual adds.
        table: What every vocabulary entry contributes at every offset [V, O, d].
    """

    module: MergeModule
    embed: Embed
    table: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, module: MergeModule, embed: Embed, vocab_size: int, chunk: int = 8192) -> Self:
        """Tabulate ids 0 .. V-1 of a module on the device of the embeddings, ``chunk`` at once."""
        ids = torch.arange(vocab_size, device=module.norm_o.weight.device)
        size, rule = embed(ids[:1]).shape[1], f"embeddings must have size {module.hidden_size}"
        remedy = "Use the backbone that the module was trained for."
        require(size == module.hidden_size, ConfigError, rule, size, remedy)
        offsets = module.table_offsets
        parts = [
            module.project(embed(part).to(module.dtype)[:, None].expand(-1, offsets, -1))
            for part in torch.split(ids, chunk)
        ]
        return cls(module, embed, torch.cat(parts))

    @torch.no_grad()
    def __call__(self, span_ids: Tensor, lengths: Tensor) -> Tensor:
        """Pool spans of ids [M, N] (int64) with lengths [M] (int64), 1 .. N, to surrogates [M, d].

        Beyond a span's length any id of the vocabulary may stand. Surrogates have the module's
        type.
        """
        width, offsets = span_ids.shape[1], self.table.shape[1]
        columns = self.module.offsets_of(lengths, width) if offsets > 1 else 0
        pooled = self.module.pool(self.table[span_ids, columns], lengths)
        if self.module.form.residual != "none":
            pooled = self.module.add_anchor(pooled, self.embed(span_ids), lengths)
        return self.module.add_rows(pooled, span_ids, lengths)


# A table of V x d numbers pays on small backbones. At 49,152 x 576 it takes 0.6 s of one core and
# 113 MB to save 2 ms of a prompt of 512 tokens; of a large model it would cost gigabytes for a pass
# that is a thousandth of the prefill.
_TABLE_BYTES: Final = 64 << 20


class SpanCache:
    """Look surrogates up by the ids of their spans; the module's weights must not change any more.

    A table of projections takes ``table_bytes`` at most; ``kept_spans`` surrogates are kept, at
    least 1.
    """

    def __init__(
        self, merged_model: MergedModel, *, table_bytes: int = _TABLE_BYTES, kept_spans: int = 4096
    ) -> None:
        self._merged_model, self._backbone = merged_model, merged_model.backbone
        self._table_bytes, self._kept_spans = table_bytes, kept_spans
        self._surrogates: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        self._lock = Lock()  # a served model answers several requests at once

    @cached_property
    def table(self) -> TabulatedMerger | None:
        """The tabulated module, made when it is first needed; None where there is no table."""
        module = self._merged_model.module
        if not isinstance(module, MergeModule) or not module.table_offsets:
            return None
        numbers = self._backbone.vocab_size * module.hidden_size * module.table_offsets
        if numbers * torch.finfo(module.dtype).bits // 8 > self._table_bytes:
            return None
        return TabulatedMerger.of(module, self._backbone.embed, self._backbone.vocab_size)

    def merge(self, span_ids: Tensor, lengths: Tensor) -> Tensor:
        """Merge different spans of ids [M, N] (int64), zero-padded, with lengths [M] in one pass.

        Surrogates [M, d] have the backbone's data type; a caller's autocast does not count, as the
        table and the surrogates are kept.
        """
        with torch.autocast(self._backbone.device.type, enabled=False):
            if self.table is None:
                return self._merged_model.surrogates(span_ids, lengths)
            return self.table(span_ids, lengths).to(self._backbone.dtype)

    def find(self, spans: Sequence[tuple[int, ...]]) -> Tensor:
        """Return the surrogates [M, d] of spans of ids, from those kept where possible."""
        with self._lock:
            return torch.stack([self._one(span) for span in spans])

    def _one(self, span: tuple[int, ...]) -> Tensor:
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
