"""Bound on the GPU memory of a distillation, from shapes alone.

Symbols: d hidden size, f feed-forward size, w width of the query heads, u of the keys, c bytes of a
number. A step takes the most where no span merges: a merge takes away more units, each with its
activations in every block, than it adds. So all T tokens of a GPU's rows count as units.

    memory     weights + module + the larger of teacher and student + what the process itself takes

What autograd keeps of a block whose weights are frozen, per unit (inputs of its products are not
kept, as no weight needs them):

    RMS norms, gated     2 * 4 d           both norms keep their input in float32
    layer norms, plain   2 c d
    attention            c (2 w + 2 u)     queries, output, keys, values
    gated feed-forward   3 c f             gate, its activation, the other half
    plain feed-forward   4 c f             GPT-2's GELU keeps four numbers

Merging inside the model and adapters are not covered. Source: bytes as saved by autograd, which the
tests measure. ZeRO stage 2: Rajbhandari et al., 2020.
"""

from __future__ import annotations

from typing import Final, Literal

import torch

from umim_core.backbone.shape import BackboneShape
from umim_core.config.form import ModuleForm
from umim_core.distill.loss import DEFAULT_CHUNK
from umim_core.merging.module import MergeModule

_PROCESS: Final = 1.5 * 2.0**30  # CUDA context, libraries' workspaces, NCCL's buffers, fragments
_WIDE: Final = 4  # bytes of float32
_LOGITS_HELD: Final = 4  # chunks of float32 logits at the peak of the loss


def step_memory(
    shape: BackboneShape,
    form: ModuleForm,
    *,
    rows: int,
    segment_length: int,
    bf16: bool,
    strategy: Literal["ddp", "deepspeed"],
    gpus: int,
    micro_batch: int | None = None,
) -> dict[str, float]:
    """Return the bytes at most that a distillation takes of one GPU, by part.

    Args:
        shape: The frozen backbone.
        form: The merge module.
        rows: Rows of one GPU's share of the batch.
        segment_length: Tokens of a row.
        bf16: Whether the frozen weights and their products are bfloat16, else float32.
        strategy: How gradients are exchanged; ``deepspeed`` shards optimiser state and gradients.
        gpus: Number of workers, one GPU each.
        micro_batch: Rows whose activations are held at once; None for all.
    """
    units = segment_length * min(rows, micro_batch or rows)
    width = 2 if bf16 else _WIDE
    per_layer = _kept_bytes(shape, width)
    student = units * (shape.layers * per_layer + _WIDE * shape.hidden_size)
    # Teacher and student follow each other, as loss and backward do; the teacher keeps one block.
    working = student + max(_loss_bytes(shape, units, width), units * per_layer)
    return {
        "weights": float(width * shape.weights),
        "module and AdamW": _trained_bytes(shape.hidden_size, form, strategy, gpus),
        "activations, loss": working,
        "process": _PROCESS,
    }


def _trained_bytes(hidden_size: int, form: ModuleForm, strategy: str, gpus: int) -> float:
    """Return bytes of weights, gradients and AdamW's two moments, all float32.

    DDP holds the gradient once more in its buckets. ZeRO-2 shards the moments, the master weights
    and the reduced gradient. Of rule rows there are the table and two moments: their gradients are
    sparse and have no bucket.
    """
    with torch.device("meta"):
        module = MergeModule.of(form, hidden_size)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    copies = 4.0 if gpus == 1 else 5.0
    if strategy == "deepspeed":
        copies = 2.0 + 4.0 / gpus
    return _WIDE * (copies * parameters + 3.0 * form.rule_rows * hidden_size)


def _kept_bytes(shape: BackboneShape, width: int) -> float:
    """Return bytes that autograd keeps of one block per unit; see the module."""
    norms = 2 * (_WIDE if shape.gated_mlp else width) * shape.hidden_size
    attention = 2 * width * (shape.query_width + shape.kv_width)
    return norms + attention + (3 if shape.gated_mlp else 4) * width * shape.intermediate_size


def _loss_bytes(shape: BackboneShape, units: int, width: int) -> float:
    chunk = min(units, DEFAULT_CHUNK["gpu"])
    hidden = 3 * width * units * shape.hidden_size  # teacher, student and its gradient
    return float(_LOGITS_HELD * _WIDE * chunk * shape.vocab_size + hidden)
