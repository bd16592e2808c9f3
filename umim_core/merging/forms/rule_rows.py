"""Rule rows: a learned offset for each of the most frequent rules, added to their surrogates.

Shapes: K rows, M spans, N tokens in the longest span, d embedding size::

    rows of  (7, 8)  (7, 8, 9)        spans  (7, 8, 9)  (5, 6)  (7, 8)
             r0      r1               get    r1         0       r0

A module learns one map for all spans; a row is free, and learns what is peculiar to its rule. A
rule without a row has the module alone.

Source: ours; free embeddings of new tokens are those of Token Distillation (ICLR 2026).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from umim_core.errors import ConfigError
from umim_core.merging.forms.span_ops import inside_spans
from umim_core.rules.grams import LONGEST, ORDERS
from umim_core.rules.ruleset import RuleSet
from umim_core.text.token_ids import MAX_TOKEN_ID, TOKEN_BITS

_NONE: Final = -1  # beyond the end of a span
_MOST_ROWS: Final = 1 << (63 - 2 * (TOKEN_BITS + 1))  # so that a key fits an int64


def frequent_spans(rules: RuleSet, count: int) -> Tensor:
    """Return the spans of the most frequent rules [K, 4] (int32), -1 beyond a span, ascending."""
    spans = np.concatenate(
        [
            np.pad(rules.ids_by_order[n], ((0, 0), (0, LONGEST - n)), constant_values=_NONE)
            for n in ORDERS
        ]
    )
    chosen = spans[np.argsort(-rules.support, kind="stable")[:count]]
    return torch.from_numpy(chosen[np.lexsort(chosen.T[::-1])].astype(np.int32))


class RuleRows(nn.Module):
    """A row of d numbers, zero at first, for each of some spans [K, 4] (int32).

    The spans are different and ascending, -1 beyond the end of one. The gradient of the ``table``
    [K, d] is sparse: a step costs what its spans cost.
    """

    spans: Tensor
    _pairs: Tensor
    _keys: Tensor

    def __init__(self, spans: Tensor, hidden_size: int) -> None:
        super().__init__()
        fits = spans.dtype == torch.int32 and spans.shape[1:] == (LONGEST,)
        if not fits or not 0 < len(spans) < _MOST_ROWS:
            raise ConfigError(
                f"rule rows must be of 1 to {_MOST_ROWS - 1:,} spans of {LONGEST} ids (int32)",
                f"{tuple(spans.shape)} {spans.dtype}",
                "Take the spans of a rule set.",
            )
        pairs, keys = _keys_of(spans.long())
        different, heads = torch.unique(pairs, return_inverse=True)
        keys = keys | (heads << 2 * (TOKEN_BITS + 1))
        inside = spans != _NONE
        gaps = inside.diff() & inside[:, 1:]
        odd = (keys.diff() <= 0).any() | ~inside[:, :2].all() | gaps.any()
        if bool(odd) or int(spans.min()) < _NONE or int(spans.max()) > MAX_TOKEN_ID:
            raise ConfigError(
                "rule rows must be of different spans of 2 to 4 ids, ascending",
                spans[:3].tolist(),
                "Take the spans of a rule set.",
            )
        self.register_buffer("spans", spans)
        self.register_buffer("_pairs", different, persistent=False)
        self.register_buffer("_keys", keys, persistent=False)
        self.table = nn.Parameter(torch.zeros(len(spans), hidden_size))

    def __len__(self) -> int:
        return len(self.spans)

    def forward(self, ids: Tensor | None, lengths: Tensor) -> Tensor:
        """Return the offsets [M, d] of spans with ids [M, N] and lengths [M] (int64), N at most 4.

        Spans without a row have zero; ids beyond a span's length may be any.
        """
        if ids is None:
            raise ConfigError("a module with rule rows needs the ids of spans", None, "Pass them.")
        places, known = self.find(ids, lengths)
        return F.embedding(places, self.table, sparse=True).masked_fill(~known[:, None], 0.0)

    def find(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row [M] of each span and whether it is the span's own [M] (bool).

        Two searches in sorted keys: of the first two ids, then of their rank with the other two.
        """
        wide = F.pad(ids, (0, LONGEST - ids.shape[1]))
        wide = wide.masked_fill(~inside_spans(lengths, LONGEST), _NONE)
        pairs, keys = _keys_of(wide)
        heads = torch.searchsorted(self._pairs, pairs)
        keys = keys | (heads << 2 * (TOKEN_BITS + 1))
        places = torch.searchsorted(self._keys, keys).clamp(max=len(self) - 1)
        return places, (self.spans[places] == wide).all(dim=1)

    def of_rules(self, rules: RuleSet) -> RuleRows | None:
        """Return the rows of those spans that are rules of a set; None where no one is."""
        has_rule = torch.zeros(len(self), dtype=torch.bool, device=self.spans.device)
        for n in ORDERS:
            ids = torch.from_numpy(rules.ids_by_order[n].astype(np.int64)).to(has_rule.device)
            places, known = self.find(ids, ids.new_full((len(ids),), n))
            has_rule[places[known]] = True
        if bool(has_rule.all()):
            return self
        if not bool(has_rule.any()):
            return None
        return RuleRows.of(self.spans[has_rule], self.table.detach()[has_rule])

    @classmethod
    def of(cls, spans: Tensor, table: Tensor) -> RuleRows:
        """Return frozen rows [K, d] of given numbers, of spans as the class takes them."""
        rows = cls(spans, table.shape[1])
        rows.table = nn.Parameter(table, requires_grad=False)
        return rows


def _keys_of(spans: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys of the first two ids [M] and of the last two [M] of spans [M, 4] (int64)."""
    first, second, third, fourth = spans.unbind(dim=1)
    return (first << TOKEN_BITS) | second, ((third + 1) << (TOKEN_BITS + 1)) | (fourth + 1)
