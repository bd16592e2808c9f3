"""The merge module with its first half tabulated, for a module that no longer changes.

What a token contributes depends on it alone (on its offset, too, with learned positions and in the
linear form), so it can be computed once per vocabulary entry. A merge is then a lookup, a softmax
and one d x d product; in the linear form a lookup and a sum. The result is exact; the price is the
table, V x d numbers, or four times as many where offsets count. Depth 3 has no table.

Shapes: V vocabulary, O offsets with a table of their own (1 or 4), M spans, N tokens, d size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from umim_core.errors import ConfigError
from umim_core.merging.module import MergeModule


@dataclass(frozen=True)
class TabulatedMerger:
    """Surrogates by token id, without gradients.

    Attributes:
        module: The module whose weights were tabulated; changing them makes the table stale.
        table: What every vocabulary entry contributes at every offset [V, O, d].
    """

    module: MergeModule
    table: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, module: MergeModule, embedding_table: Tensor, chunk: int = 8192) -> TabulatedMerger:
        """Tabulate a module.

        Args:
            module: The module, on the device of the embeddings.
            embedding_table: What the backbone reads for every id [V, d].
            chunk: Vocabulary entries projected at once.

        Raises:
            ConfigError: If the embeddings have another size than the module, or if its tokens look
                at their neighbours (depth 3).
        """
        size = module.hidden_size
        if embedding_table.shape[1] != size:
            raise ConfigError(
                f"the embeddings must have the module's size {size}",
                embedding_table.shape[1],
                "Use the backbone that the module was trained for.",
            )
        offsets = module.table_offsets
        parts = [
            module.project(part.to(module.dtype)[:, None].expand(-1, offsets, -1))
            for part in torch.split(embedding_table, chunk)
        ]
        return cls(module, torch.cat(parts))

    @torch.no_grad()
    def __call__(self, span_ids: Tensor, lengths: Tensor) -> Tensor:
        """Pool spans of ids.

        Args:
            span_ids: Token ids [M, N] (int64); beyond a span's length any id of the vocabulary.
            lengths: Tokens of each span [M] (int64), 1 .. N.

        Returns:
            Surrogate embeddings [M, d] in the module's own data type.
        """
        width, offsets = span_ids.shape[1], self.table.shape[1]
        columns = torch.arange(width, device=span_ids.device) if offsets > 1 else 0
        return self.module.pool(self.table[span_ids, columns], lengths)
