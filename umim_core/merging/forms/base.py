"""What all forms of the merge module have in common.

Shapes: M spans, N tokens in the longest span, d embedding size.
"""

from __future__ import annotations

import math
from typing import ClassVar, Final, Self, cast

import torch
from torch import Tensor, nn

from umim_core.errors import ConfigError
from umim_core.merging.policies import Depth, Kind, Positions, check_form
from umim_core.rules.grams import ORDERS

MAX_SPAN: Final = ORDERS[-1]


class MergeModule(nn.Module):
    """Make one embedding of a span of token embeddings.

    ``MergeModule(d)`` is the paper's form. Other policies give another class, as ``pathlib.Path``
    gives the class of the system: each form declares the policies it stands for.

    Args:
        hidden_size: Embedding size d of the backbone.
        num_heads: Heads h; must divide d.
        positions: ``none`` or ``learned``.
        depth: 1 or 3.
        kind: ``attention`` or ``linear``.

    Attributes:
        norm_o: The last layer of every form, at the scale of the backbone's embeddings.

    Raises:
        ConfigError: If the heads do not divide the size or there is no such form.
    """

    _forms: ClassVar[dict[tuple[Kind, Depth], type[MergeModule]]] = {}

    norm_o: nn.LayerNorm

    def __init_subclass__(cls, *, kind: Kind, depth: Depth) -> None:
        super().__init_subclass__()
        cls._forms[kind, depth] = cls

    def __new__(
        cls,
        hidden_size: int = 0,
        num_heads: int = 4,
        positions: Positions = "none",
        depth: Depth = 1,
        kind: Kind = "attention",
    ) -> Self:
        """Return an object of the class that stands for the policies."""
        # A copy makes an object of its own class, without arguments.
        form = cls._forms.get((kind, depth), cls) if cls is MergeModule else cls
        return cast(Self, super().__new__(form))

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        positions: Positions = "none",
        depth: Depth = 1,
        kind: Kind = "attention",
    ) -> None:
        super().__init__()
        if hidden_size < 1 or num_heads < 1 or hidden_size % num_heads:
            raise ConfigError(
                "num_heads must divide hidden_size",
                f"{num_heads} heads, size {hidden_size}",
                "Choose a divisor.",
            )
        check_form(positions, depth, kind)
        self.hidden_size, self.num_heads, self.positions = hidden_size, num_heads, positions
        self.depth, self.kind = depth, kind
        self.make_weights()

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights, and of the surrogates."""
        return self.norm_o.weight.dtype

    @property
    def table_offsets(self) -> int:
        """Offsets that need a table of their own (1 or 4) where a form can be tabulated."""
        return MAX_SPAN

    def forward(self, spans: Tensor, lengths: Tensor) -> Tensor:
        """Merge spans.

        Args:
            spans: Token embeddings [M, N, d] of any float type; what stands beyond a span's length
                has no influence.
            lengths: Tokens of each span [M] (int64), 1 .. N.

        Returns:
            Surrogate embeddings [M, d] in the module's own data type.
        """
        outside = ~inside_spans(lengths, spans.shape[1])
        tokens = spans.to(self.dtype).masked_fill(outside[..., None], 0.0)
        return self.merge(tokens, lengths)

    def make_weights(self) -> None:
        """Register the parameters."""
        raise NotImplementedError

    def initialise(self, embedding_std: float, generator: torch.Generator | None = None) -> None:
        """Draw fresh weights; the output starts at the scale of the backbone's embeddings.

        Args:
            embedding_std: Standard deviation of the backbone's embedding matrix; LN_o's gain.
            generator: Source of randomness; the global one if None.
        """
        raise NotImplementedError

    def merge(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Merge tokens [M, N, d] of the module's data type, zero beyond their span, to [M, d]."""
        raise NotImplementedError

    def project(self, tokens: Tensor) -> Tensor:
        """Compute what a span's tokens contribute, each on its own.

        Args:
            tokens: Embeddings [..., N, d] of offsets 0 .. N-1, in the module's own data type.

        Returns:
            Their parts [..., N, d], for ``pool``.

        Raises:
            ConfigError: If tokens of this form look at their neighbours.
        """
        raise NotImplementedError

    def pool(self, projected: Tensor, lengths: Tensor) -> Tensor:
        """Make surrogates [M, d] of parts [M, N, d], of any content beyond the lengths [M]."""
        raise NotImplementedError


def inside_spans(lengths: Tensor, width: int) -> Tensor:
    """Return which of ``width`` offsets lie in a span of each length: [M, width] (bool)."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def draw_linear(linear: nn.Linear, generator: torch.Generator | None) -> None:
    """Draw a linear layer as PyTorch does by default: weight, then bias, +-1/sqrt(inputs)."""
    bound = 1.0 / math.sqrt(linear.in_features)
    linear.weight.uniform_(-bound, bound, generator=generator)
    linear.bias.uniform_(-bound, bound, generator=generator)


def reset_norm(norm: nn.LayerNorm, gain: float) -> None:
    """Set a norm's gain and clear its bias."""
    norm.weight.fill_(gain)
    norm.bias.zero_()
