"""Input adapter: a trained change of the embedding of every raw token.

    e'(x) = e(x) + A(e(x))        A(e) = s * (W_2 LN(GELU(W_1 LN(e) + b_1)) + b_2)

W_2 and b_2 are zero at the start. The scale s begins at the standard deviation of the embeddings,
as the output scale of a merge module does. A has exactly its 2 d^2 + 7 d parameters:
two products 2 d^2 + 2 d, two norms 4 d, the scale d.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from umim_core.adaptation.control import CONTROLS
from umim_core.backbone.backbone import Backbone


class InputAdapter(nn.Module):
    """The change A of an embedding; zero until it is trained."""

    def __init__(self, hidden_size: int, scale: float) -> None:
        super().__init__()
        self.norm_e = nn.LayerNorm(hidden_size)
        self.inner = nn.Linear(hidden_size, hidden_size)
        self.norm_h = nn.LayerNorm(hidden_size)
        self.outer = nn.Linear(hidden_size, hidden_size)
        self.scale = nn.Parameter(torch.full((hidden_size,), scale))
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return A(e) [..., d] in single precision for embeddings [..., d]."""
        hidden = self.norm_h(F.gelu(self.inner(self.norm_e(embeddings.float()))))
        out: Tensor = self.scale * self.outer(hidden)
        return out


class _AdaptedEmbedding(nn.Module):
    """An embedding layer, and what an adapter adds to what it gives."""

    def __init__(self, embedding: nn.Module, adapter: InputAdapter) -> None:
        super().__init__()
        self.embedding, self.adapter = embedding, adapter
        self.weight = embedding.get_parameter("weight")

    def forward(self, ids: Tensor) -> Tensor:
        plain: Tensor = self.embedding(ids)
        change: Tensor = self.adapter(plain)
        return plain + change.to(plain.dtype)


@CONTROLS.add("input-adapter")
def input_adapter(twin: Backbone) -> InputAdapter:
    """Change the embedding of every token; 2 d^2 + 7 d parameters."""
    adapter = InputAdapter(twin.hidden_size, twin.embedding_std).to(twin.device)
    twin.model.set_input_embeddings(_AdaptedEmbedding(twin.embedding, adapter))
    return adapter
