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

from umim_core.errors import ConfigError, require
from umim_core.merging.packing import inside_spans
from umim_core.rules.grams import LONGEST, MAX_LONGEST
from umim_core.rules.ruleset import RuleSet
from umim_core.text.token_ids import MAX_TOKEN_ID, TOKEN_BITS

_REMEDY: Final = "Take the spans of a rule set."
_NONE: Final = -1  # beyond the end of a span
_PAIR_BITS: Final = 2 * (TOKEN_BITS + 1)
_MOST_ROWS: Final = 1 << (63 - _PAIR_BITS)  # so that a key fits an int64


def frequent_spans(rules: RuleSet, count: int) -> Tensor:
    """Return the spans of the most frequent rules [K, longest] (int32), -1 beyond, ascending."""
    spans = np.concatenate(
        [
            np.pad(ids, ((0, 0), (0, rules.longest - n)), constant_values=_NONE)
            for n, ids in rules.ids_by_order.items()
        ]
    )
    chosen = spans[np.argsort(-rules.support, kind="stable")[:count]]
    return torch.from_numpy(chosen[np.lexsort(chosen.T[::-1])].astype(np.int32))


class RuleRows(nn.Module):
    """A row of d numbers, zero at first, for each of some spans [K, N] (int32).

    The spans are different and ascending, -1 beyond the end of one. The gradient of the ``table``
    [K, d] is sparse: a step costs what its spans cost.
    """

    spans: Tensor

    def __init__(self, spans: Tensor, hidden_size: int) -> None:
        super().__init__()
        fits = spans.dtype == torch.int32 and spans.ndim == 2
        fits = fits and LONGEST <= spans.shape[1] <= MAX_LONGEST
        require(
            fits and 0 < len(spans) < _MOST_ROWS,
            ConfigError,
            f"rule rows must be of 1 to {_MOST_ROWS - 1:,} spans of {LONGEST} to {MAX_LONGEST} "
            "ids (int32)",
            f"{tuple(spans.shape)} {spans.dtype}",
            _REMEDY,
        )
        self._levels = 0
        heads = torch.zeros(len(spans), dtype=torch.int64, device=spans.device)
        for keys in _keys_of(spans.long()):
            keys = keys | (heads << _PAIR_BITS)
            different, heads = torch.unique(keys, return_inverse=True)
            self.register_buffer(f"_level_{self._levels}", different, persistent=False)
            self._levels += 1
        inside = spans != _NONE
        gaps = inside.diff() & inside[:, 1:]
        odd = (heads.diff() <= 0).any() | ~inside[:, :2].all() | gaps.any()
        fits = not bool(odd) and int(spans.min()) >= _NONE and int(spans.max()) <= MAX_TOKEN_ID
        rule = f"rule rows must be of different spans of 2 to {spans.shape[1]} ids, ascending"
        require(fits, ConfigError, rule, spans[:3].tolist(), _REMEDY)
        self.register_buffer("spans", spans)
        self.table = nn.Parameter(torch.zeros(len(spans), hidden_size))

    def __len__(self) -> int:
        return len(self.spans)

    def forward(self, ids: Tensor | None, lengths: Tensor) -> Tensor:
        """Return the offsets [M, d] of spans with ids [M, N] and lengths [M] (int64).

        Spans without a row have zero; ids beyond a span's length may be any.
        """
        if ids is None:
            raise ConfigError("a module with rule rows needs the ids of spans", None, "Pass them.")
        places, known = self.find(ids, lengths)
        return F.embedding(places, self.table, sparse=True).masked_fill(~known[:, None], 0.0)

    def find(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row [M] of each span and whether it is the span's own [M] (bool).

        Searches in sorted keys: of the first two ids, then of their rank with the next two.
        """
        longest = self.spans.shape[1]
        wide = F.pad(ids, (0, longest - ids.shape[1]))  # or cut: a longer span has no row
        wide = wide.masked_fill(~inside_spans(lengths, longest), _NONE)
        places = torch.zeros_like(lengths)
        for level, keys in enumerate(_keys_of(wide)):
            keys = keys | (places << _PAIR_BITS)
            places = torch.searchsorted(getattr(self, f"_level_{level}"), keys)
        places = places.clamp(max=len(self) - 1)
        return places, (self.spans[places] == wide).all(dim=1) & (lengths <= longest)

    def of_rules(self, rules: RuleSet) -> RuleRows | None:
        """Return the rows of those spans that are rules of a set; None where no one is."""
        has_rule = torch.zeros(len(self), dtype=torch.bool, device=self.spans.device)
        for n, rows in rules.ids_by_order.items():
            ids = torch.from_numpy(rows.astype(np.int64)).to(has_rule.device)
            places, known = self.find(ids, ids.new_full((len(ids),), n))
            has_rule[places[known]] = True
        if bool(has_rule.all()):
            return self
        if not bool(has_rule.any()):
            return None
        return RuleRows.of(self.spans[has_rule], self.table.detach()[has_rule])

    @classmethod
    def of_frequent(
        cls, rules: RuleSet, count: int, hidden_size: int, start: RuleRows | None = None
    ) -> RuleRows:
        """Return the rows of the most frequent rules, with the numbers of those in ``start``."""
        rows = cls(frequent_spans(rules, count), hidden_size)
        if start is not None:
            spans = rows.spans.long()
            places, known = start.find(spans, (spans != _NONE).sum(dim=1))
            rows.table.data[known] = start.table.detach()[places[known]]
        return rows

    @classmethod
    def of(cls, spans: Tensor, table: Tensor) -> RuleRows:
        """Return frozen rows [K, d] of given numbers, of spans as the class takes them."""
        rows = cls(spans, table.shape[1])
        rows.table = nn.Parameter(table, requires_grad=False)
        return rows


def _keys_of(spans: Tensor) -> list[Tensor]:
    """Return a key [M] of each two ids of spans [M, N] (int64), from the first on."""
    even = F.pad(spans, (0, spans.shape[1] % 2), value=_NONE) + 1
    return list(((even[:, ::2] << (TOKEN_BITS + 1)) | even[:, 1::2]).unbind(dim=1))
