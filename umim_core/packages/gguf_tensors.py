"""Tensors of a GGUF file under their names in a Hugging Face directory, checked to be all there.

Shapes: d embedding size, f feed-forward size, h heads, k heads of keys, s size of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umim_core.packages.gguf_architectures import (
    ROPE_FACTORS,
    Architecture,
    architecture_of,
    refuse,
    unsupported,
)
from umim_core.packages.gguf_file import GgufFile


@dataclass(frozen=True)
class TensorPlan:
    """A tensor to be written.

    Attributes:
        target: Its name in Hugging Face's form.
        source: Its name in the GGUF file.
        shape: Its sizes.
        heads: Heads whose rows must be put back from llama.cpp's order; 0 if they stand right.
    """

    target: str
    source: str
    shape: tuple[int, ...]
    heads: int = 0


def tensors_of(architecture: Architecture, config: Mapping[str, Any]) -> Iterator[TensorPlan]:
    """Yield the tensors of a model, layer by layer."""
    d, f, s = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    hs, ks = heads * s, keys * s
    sizes = {"d": d, "f": f, "s": s, "hs": hs, "ks": ks, "hs+2ks": hs + 2 * ks, "2f": 2 * f}
    table = (config["vocab_size"], d)
    yield TensorPlan("model.embed_tokens.weight", "token_embd.weight", table)
    yield TensorPlan("model.norm.weight", "output_norm.weight", (d,))
    if not config["tie_word_embeddings"]:
        yield TensorPlan("lm_head.weight", "output.weight", table)
    turned = {"attn_q.weight": heads, "attn_k.weight": keys} if architecture.interleaved else {}
    for layer in range(config["num_hidden_layers"]):
        for source, (target, shape) in architecture.layer.items():
            sized = tuple(sizes[letter] for letter in shape)
            yield TensorPlan(
                f"model.layers.{layer}.{target}",
                f"blk.{layer}.{source}",
                sized,
                turned.get(source, 0),
            )


def tensor_plan(file: GgufFile, config: Mapping[str, Any]) -> list[TensorPlan]:
    """Return the tensors to write, by name; the file's are checked to be exactly those.

    Raises:
        BackboneError: If a tensor is missing, unknown or of another shape.
    """
    plans = []
    for plan in tensors_of(architecture_of(file), config):
        if plan.source not in file.tensors:  # before the next ones, however many the file claims
            refuse(
                "a GGUF file must hold every tensor of its model",
                f"{file.path} lacks {plan.source}",
                "",
            )
        if (shape := file.tensors[plan.source].shape) != plan.shape:
            refuse(
                f"{plan.source} of this GGUF file must have the sizes {plan.shape}",
                shape,
                "The file is damaged, or its model is not one of its architecture.",
            )
        plans.append(plan)
    used = {plan.source for plan in plans} | {ROPE_FACTORS}
    if strange := [name for name in file.tensors if name not in used]:
        unsupported(f"the tensor {strange[0]}", file.tensors[strange[0]].shape)
    return sorted(plans, key=lambda plan: plan.target)


def hugging_face_rows(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Put the rows of a query or key projection back from llama.cpp's order.

    Rotary pairs stand next to each other there and half a head apart here::

        a head of 6 rows, in the file   0 3 1 4 2 5
        returned                        0 1 2 3 4 5

    Args:
        weight: The projection [heads * s, d].
        heads: Number of its heads.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def llama_rows(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Put the rows of a query or key projection into llama.cpp's order; see ``hugging_face_rows``.

    Args:
        weight: The projection [heads * s, d].
        heads: Number of its heads.
    """
    pairs = weight.reshape(heads, 2, -1, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
