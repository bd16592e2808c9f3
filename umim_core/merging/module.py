"""The merge module: attention pooling of a span's embeddings into one surrogate embedding.

Shapes: M spans, N tokens in the longest span, d embedding size, h heads, d_h = d / h.

    P   = LN_kv(GELU(Linear_kv(E)))                 [M, N, d], per token
    a_i = softmax(P_i q_i / sqrt(d_h))              [M, N], per head, over the span
    o_i = sum_t a_i[t] P_i[t]                       [M, d_h]
    z   = LN_o(GELU(Linear_o([o_1; ...; o_h])))     [M, d]

Source: paper, "Module Architecture and Integration".
"""

from __future__ import annotations

import math
from typing import Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from umim_core.errors import ConfigError
from umim_core.rules.grams import ORDERS

Positions = Literal["none", "learned"]
MAX_SPAN: Final = ORDERS[-1]


class MergeModule(nn.Module):
    """Pool a span of token embeddings into one embedding.

    In the paper's form (``positions="none"``) it has 2 d^2 + 7 d parameters and does not see the
    order of the tokens; ``learned`` adds one vector per offset before the first projection.

    Args:
        hidden_size: Embedding size d of the backbone.
        num_heads: Pooling heads h; must divide d.
        positions: ``none`` or ``learned``.

    Raises:
        ConfigError: If the heads do not divide the size or the policy is unknown.
    """

    def __init__(self, hidden_size: int, num_heads: int = 4, positions: Positions = "none") -> None:
        super().__init__()
        if hidden_size < 1 or num_heads < 1 or hidden_size % num_heads:
            raise ConfigError(
                "num_heads must divide hidden_size",
                f"{num_heads} heads, size {hidden_size}",
                "Choose a divisor.",
            )
        if positions not in ("none", "learned"):
            raise ConfigError("positions must be 'none' or 'learned'", positions, "Choose one.")
        self.hidden_size, self.num_heads, self.positions = hidden_size, num_heads, positions
        self.linear_kv = nn.Linear(hidden_size, hidden_size)
        self.norm_kv = nn.LayerNorm(hidden_size, eps=1e-5)
        self.query = nn.Parameter(torch.empty(num_heads, hidden_size // num_heads))
        self.linear_o = nn.Linear(hidden_size, hidden_size)
        self.norm_o = nn.LayerNorm(hidden_size, eps=1e-5)
        if positions == "learned":
            self.offset = nn.Parameter(torch.zeros(MAX_SPAN, hidden_size))
        else:
            self.register_parameter("offset", None)
        nn.init.normal_(self.query, std=0.02)

    def initialise(self, embedding_std: float, generator: torch.Generator | None = None) -> None:
        """Draw fresh weights; the output starts at the scale of the backbone's embeddings.

        Args:
            embedding_std: Standard deviation of the backbone's embedding matrix; LN_o's gain.
            generator: Source of randomness; the global one if None.
        """
        bound = 1.0 / math.sqrt(self.hidden_size)
        with torch.no_grad():
            for linear in (self.linear_kv, self.linear_o):
                linear.weight.uniform_(-bound, bound, generator=generator)
                linear.bias.uniform_(-bound, bound, generator=generator)
            self.query.normal_(0.0, 0.02, generator=generator)
            for norm, gain in ((self.norm_kv, 1.0), (self.norm_o, embedding_std)):
                norm.weight.fill_(gain)
                norm.bias.zero_()
            if self.offset is not None:
                self.offset.zero_()

    def forward(self, spans: Tensor, lengths: Tensor) -> Tensor:
        """Pool spans.

        Args:
            spans: Token embeddings [M, N, d] of any float type; what stands beyond a span's length
                has no influence.
            lengths: Tokens of each span [M] (int64), 1 .. N.

        Returns:
            Surrogate embeddings [M, d] in the module's own data type.
        """
        inside = _inside(lengths, spans.shape[1])
        tokens = spans.to(self.query.dtype).masked_fill(~inside[..., None], 0.0)
        return self.pool(self.project(tokens), lengths)

    def project(self, tokens: Tensor) -> Tensor:
        """Project every token on its own: embeddings [..., N, d] of offsets 0 .. N-1 to P.

        Args:
            tokens: In the module's own data type; N is 1 .. 4 with learned positions.

        Returns:
            P [..., N, d].
        """
        if self.offset is not None:
            tokens = tokens + self.offset[: tokens.shape[-2]]
        out: Tensor = self.norm_kv(F.gelu(self.linear_kv(tokens)))
        return out

    def pool(self, projected: Tensor, lengths: Tensor) -> Tensor:
        """Pool P [M, N, d] of spans with lengths [M] to surrogates [M, d]."""
        count, width, size = projected.shape
        heads = projected.view(count, width, *self.query.shape)  # [M, N, h, d_h]
        scores = torch.einsum("mnhk,hk->mhn", heads, self.query) / math.sqrt(heads.shape[-1])
        inside = _inside(lengths, width)
        weights = scores.masked_fill(~inside[:, None], -torch.inf).softmax(dim=-1)
        pooled = torch.einsum("mhn,mnhk->mhk", weights, heads).reshape(count, size)
        out: Tensor = self.norm_o(F.gelu(self.linear_o(pooled)))
        return out


def _inside(lengths: Tensor, width: int) -> Tensor:
    """Return which of ``width`` offsets lie in a span of each length: [M, width] (bool)."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]
