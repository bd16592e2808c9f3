"""Attention pooling of tokens that attend to each other first: the capacity ablation, depth 3.

Shapes: M spans, N tokens in the longest span, d embedding size, h heads, d_h = d / h.

    X <- X + Linear_o(softmax(Q K^T / sqrt(d_h)) V),  [Q; K; V] = Linear_qkv(LN(X))     twice
    z  = attention pooling of X

Source: the paper names the ablation ("depth 3"); the layers are ours: pre-norm, without a
feed-forward part.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from umim_core.merging.forms.span_ops import draw_linear, inside_spans, reset_norm
from umim_core.merging.module import MergeModule


class SpanAttention(nn.Module):
    """One pre-norm layer of self-attention over a span: 4 d^2 + 6 d parameters."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(hidden_size, eps=1e-5)
        self.linear_qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.linear_o = nn.Linear(hidden_size, hidden_size)

    @torch.no_grad()
    def initialise(self, embedding_std: float, generator: torch.Generator | None) -> None:
        """Draw Linear_qkv and Linear_o; what is added starts at the scale of the embeddings."""
        draw_linear(self.linear_qkv, generator)
        draw_linear(self.linear_o, generator)
        self.linear_o.weight.mul_(embedding_std)
        self.linear_o.bias.mul_(embedding_std)
        reset_norm(self.norm, 1.0)

    def forward(self, tokens: Tensor, inside: Tensor) -> Tensor:
        """Let tokens [M, N, d] look at those ``inside`` [M, N] (bool) their own span."""
        count, width, size = tokens.shape
        split = (count, width, 3, self.num_heads, size // self.num_heads)
        queries, keys, values = self.linear_qkv(self.norm(tokens)).view(split).unbind(dim=2)
        scores = torch.einsum("mqhk,mthk->mhqt", queries, keys) / math.sqrt(split[-1])
        weights = scores.masked_fill(~inside[:, None, None], -torch.inf).softmax(dim=-1)
        mixed = torch.einsum("mhqt,mthk->mqhk", weights, values).reshape(count, width, size)
        out: Tensor = tokens + self.linear_o(mixed)
        return out


class ContextualPooling(MergeModule):
    """Two layers of self-attention, then attention pooling: 10 d^2 + 19 d parameters.

    Without positions it sees neither order nor repetition, as the paper's form: attention weighs a
    token by what it is. Learned positions (a vector per offset) are added before the first layer.
    """

    def make_weights(self) -> None:
        super().make_weights()
        sizes = (self.hidden_size, self.num_heads)
        self.layers = nn.ModuleList(SpanAttention(*sizes) for _ in range(1, self._form.depth))

    @torch.no_grad()
    def initialise(self, embedding_std: float, generator: torch.Generator | None = None) -> None:
        """Draw the pooling exactly as depth 1 does, then the layers, the first one first."""
        super().initialise(embedding_std, generator)
        for layer in self.layers:
            assert isinstance(layer, SpanAttention)  # noqa: S101  made so above
            layer.initialise(embedding_std, generator)

    def merge(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        tokens, inside = self.place(tokens, lengths), inside_spans(lengths, tokens.shape[1])
        for layer in self.layers:
            tokens = layer(tokens, inside)
        return self.pool(self.values(tokens), lengths)
