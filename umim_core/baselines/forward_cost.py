"""Floating-point operations of a transformer's forward, estimated from its weights.

Two per weight of a matrix and token, four per layer, width and pair of a query and a key that it
sees. Norms, biases and activations are left out; GPT-2's table of positions is counted as a matrix.
"""

from __future__ import annotations

from transformers import PreTrainedModel


def forward_flops(model: PreTrainedModel, tokens: int, pairs: int, targets: int = 0) -> int:
    """Estimate the floating-point operations of forwards.

    Args:
        model: Any transformer with input embeddings.
        tokens: Tokens that are read.
        pairs: Pairs of a query and a key that it sees, T (T + 1) / 2 in a causal text of T.
        targets: Tokens whose probability over the vocabulary is computed.
    """
    vocabulary, width = model.get_input_embeddings().get_parameter("weight").shape
    trunk = model.base_model
    matrices = sum(weight.numel() for weight in trunk.parameters() if weight.ndim > 1)
    layers = int(model.config.num_hidden_layers)
    blocks = 2 * (matrices - vocabulary * width) * tokens
    return blocks + 4 * layers * width * pairs + 2 * vocabulary * width * targets


def causal_pairs(tokens: int) -> int:
    """Return the pairs of a query and a key that it sees in a causal text."""
    return tokens * (tokens + 1) // 2
