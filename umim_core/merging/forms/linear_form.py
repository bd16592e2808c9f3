"""One linear layer over the tokens side by side: the simplest form that sees the order.

Shapes: M spans, N tokens in the longest span, d embedding size.

    z = LN_o(W [e_1; e_2; e_3; e_4] + b) = LN_o(sum_t W_t e_t + b)     [M, d]; missing e_t are zero

Source: ours, a control of the paper's attention pooling.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from umim_core.merging.forms.span_ops import draw_linear
from umim_core.merging.module import MergeModule


class LinearMerge(MergeModule):
    """Concatenate the embeddings, zero-padded to 4 d, and map them to d: 4 d^2 + 3 d parameters.

    Of rules of more tokens, ``longest`` stands for 4.

    It has a weight per offset: it sees order and repetition. Heads play no part in it.
    """

    def make_weights(self) -> None:
        self.linear_o = nn.Linear(self.longest * self.hidden_size, self.hidden_size)
        self.norm_o = nn.LayerNorm(self.hidden_size, eps=1e-5)

    @torch.no_grad()
    def initialise(self, embedding_std: float, generator: torch.Generator | None = None) -> None:
        draw_linear(self.linear_o, generator)
        self.reset_output(embedding_std)

    def merge(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Map tokens [M, N, d], zero beyond their span, to surrogates [M, d]; N at most longest."""
        count, width, size = tokens.shape
        missing = tokens.new_zeros(count, self.longest - width, size)
        joined = torch.cat([tokens, missing], dim=1).view(count, self.longest * size)
        out: Tensor = self.norm_o(self.linear_o(joined))
        return out
