"""Cost law of a distillation on given GPUs: memory of one and time, from shapes alone.

Symbols: d hidden size, f feed-forward size, l layers, V vocabulary, P weights of the blocks,
T raw tokens and S units of one GPU's rows, M spans, c bytes of a number.

    FLOPs      teacher 2 P T; student 2 P S forward and 2 P S for the input's gradient, none for
               frozen weights; causal attention 2 l w L per raw token and 3 times that per unit,
               w the width of the query heads, L the length of a row; loss 6 S V d, three products,
               for a row's units before its first merge are few
    memory     weights + module + the larger of teacher and student + what the process itself takes
    time       FLOPs over 45 % of the peak, or the bytes that must move, whichever takes longer,
               and the all-reduce of the module's gradient, 2 (g - 1) / g times its bytes; of rule
               rows ranks exchange those of a step alone, which is left out

What autograd keeps of a block whose weights are frozen, per unit (inputs of its products are not
kept, as no weight needs them):

    RMS norms, gated     2 * 4 d           both norms keep their input in float32
    layer norms, plain   2 c d
    attention            c (2 w + 2 u)     queries, output, keys, values; u the width of the keys
    gated feed-forward   3 c f             gate, its activation, the other half
    plain feed-forward   4 c f             GPT-2's GELU keeps four numbers

Source: FLOPs as counted by ``torch.utils.flop_counter``, bytes as saved by autograd; the tests
measure both. Ring all-reduce: Patarasuk and Yuan, 2009. ZeRO stage 2: Rajbhandari et al., 2020.
"""

from __future__ import annotations

from typing import Final, Literal

import torch

from umim_core.backbone.shape import BackboneShape
from umim_core.config.form import ModuleForm
from umim_core.config.hardware import HardwareConfig
from umim_core.cost.prediction import GIB, Limits, Prediction
from umim_core.distill.loss import DEFAULT_CHUNK
from umim_core.merging.forms.merge_form import MAX_SPAN
from umim_core.merging.module import MergeModule

MFU: Final = 0.45  # share of the peak that a step is assumed to reach, its gate on a GPU
_CONTEXT: Final = 1.5 * 2.0**30  # CUDA context, libraries' workspaces, NCCL's buffers, fragments
_MEAN_SPAN: Final = 3.0  # raw tokens of a span, 2 to 4
_WIDE: Final = 4  # bytes of float32
# Of the loss: chunks of float32 logits at its peak, and how often it reads or writes a logit.
_LOGITS_HELD: Final = 4
_LOGITS_MOVED: Final = 27


def predict_distillation(
    shape: BackboneShape,
    form: ModuleForm,
    *,
    rows: int,
    segment_length: int,
    bf16: bool,
    strategy: Literal["ddp", "deepspeed"],
    hardware: HardwareConfig,
    steps: int,
    micro_batch: int | None = None,
) -> Prediction:
    """Predict memory and time of a distillation.

    Args:
        shape: The frozen backbone.
        form: The merge module.
        rows: Rows of one GPU's share of the batch.
        segment_length: Raw tokens L of a row.
        bf16: Whether the frozen weights and their products are bfloat16, else float32.
        strategy: How gradients are exchanged; ``deepspeed`` shards optimiser state and gradients.
        hardware: The GPUs, and the token reduction to assume.
        steps: Optimiser steps at most.
        micro_batch: Rows whose activations are held at once; None for all.
    """
    reduction = hardware.expected_token_reduction
    raw = float(rows * segment_length)
    units = raw * (1.0 - reduction)
    spans = min(raw * reduction / (_MEAN_SPAN - 1.0), units)
    trained = _parameters(shape.hidden_size, form)
    width = 2 if bf16 else _WIDE
    kept = _kept_bytes(shape, width)
    held = min(rows, micro_batch or rows) / rows
    memory = {
        "weights": float(width * shape.weights),
        "module": _trained_bytes(trained, strategy, hardware.gpus)
        + _row_bytes(shape.hidden_size, form),
        "spans": spans * _span_bytes(shape.hidden_size, form),
        "teacher": held * raw * kept,
        "student": held * units * (shape.layers * kept + _WIDE * shape.hidden_size),
        "backward": held * units * kept,
        "loss": _loss_bytes(shape, held * units, width),
        "context": _CONTEXT,
    }
    # Teacher and student follow each other, as loss and backward do.
    working = max(memory["teacher"], memory["student"] + max(memory["loss"], memory["backward"]))
    shown = {
        "weights": memory["weights"],
        "module and AdamW": memory["module"] + memory["spans"],
        "activations, loss": working,
        "process": _CONTEXT,
    }
    flops = _flops(shape, form, raw, units, spans, segment_length)
    logits = units * shape.vocab_size * _WIDE
    moved = 3.0 * memory["weights"] + _LOGITS_MOVED * logits
    exchange = 2.0 * (hardware.gpus - 1) / hardware.gpus * _WIDE * trained
    exchange_seconds = exchange / (hardware.interconnect_gbs * 1e9)
    computing = sum(flops.values()) / (MFU * hardware.bf16_tflops * 1e12)
    step = max(computing, moved / (hardware.memory_bandwidth_gbs * 1e9)) + exchange_seconds
    total = memory["weights"] + memory["module"] + memory["spans"] + _CONTEXT + working
    return Prediction(
        work="distillation",
        basis=f"{hardware.gpus} x {hardware.name}",
        remedy="Lower distill.micro_batch or distill.batch_size, or use GPUs with more memory.",
        holder="GPU",
        memory_bytes=total,
        memory_parts=shown,
        seconds={"all steps": steps * step},
        limits=Limits(memory=hardware.gpu_memory_gib),
        figures={
            "hardware": hardware.name,
            "gpus": hardware.gpus,
            "gpu_memory_gib": hardware.gpu_memory_gib,
            "fits": total <= hardware.gpu_memory_gib * GIB,
            "token_reduction": reduction,
            "memory": memory,
            "working_bytes": working,
            "flops": flops,
            "step_flops": sum(flops.values()),
            "step_seconds": step,
            "exchange_seconds": exchange_seconds,
            "steps": steps,
            "seconds": steps * step,
            "assumed_mfu": MFU,
        },
        notes={
            "steps at most": f"{steps:,}",
            "time of a step": f"{step:.3f} s",
            "assumed": f"token reduction {reduction:.1%}, {MFU:.0%} of the peak",
        },
    )


def _parameters(hidden_size: int, form: ModuleForm) -> int:
    with torch.device("meta"):
        module = MergeModule.of(form, hidden_size)
    return sum(parameter.numel() for parameter in module.parameters())


def _row_bytes(hidden_size: int, form: ModuleForm) -> float:
    """Return bytes of the rule rows' table and of its two moments, at most: rules may be fewer.

    Their gradients are sparse, and DDP has no bucket for them (``tasks/training/strategies.py``).
    """
    return 3.0 * _WIDE * form.rule_rows * hidden_size


def _trained_bytes(parameters: int, strategy: str, gpus: int) -> float:
    """Return bytes of weights, gradients and AdamW's two moments, all float32.

    DDP holds the gradient once more in its buckets. ZeRO-2 shards the moments, the master weights
    and the reduced gradient.
    """
    if strategy == "deepspeed":
        return parameters * _WIDE * (2.0 + 4.0 / gpus)
    return parameters * _WIDE * (4.0 if gpus == 1 else 5.0)


def _span_bytes(size: int, form: ModuleForm) -> float:
    """Return bytes that the merge module keeps per span, as padded to four tokens."""
    if form.kind == "linear":
        return float(_WIDE * size * (MAX_SPAN + 1))
    # per token: input, GELU's and norm's inputs, P; per span: pooled, GELU's and norm's inputs;
    # a layer over the span keeps its norm's input and output, queries, keys, values, the mixture
    per_token = 4 + 6 * (form.depth - 1)
    return float(_WIDE * size * (MAX_SPAN * per_token + 3))


def _kept_bytes(shape: BackboneShape, width: int) -> float:
    """Return bytes that autograd keeps of one block per unit; see the module."""
    norms = 2 * (_WIDE if shape.gated_mlp else width) * shape.hidden_size
    attention = 2 * width * (shape.query_width + shape.kv_width)
    return norms + attention + (3 if shape.gated_mlp else 4) * width * shape.intermediate_size


def _loss_bytes(shape: BackboneShape, units: float, width: int) -> float:
    chunk = min(units, DEFAULT_CHUNK["gpu"])
    hidden = 3 * width * units * shape.hidden_size  # teacher, student and its gradient
    return _LOGITS_HELD * _WIDE * chunk * shape.vocab_size + hidden


def _flops(
    shape: BackboneShape,
    form: ModuleForm,
    raw: float,
    units: float,
    spans: float,
    segment_length: int,
) -> dict[str, float]:
    square = shape.hidden_size**2
    per_unit = 2.0 * shape.layers * shape.query_width * segment_length
    reduced = per_unit * units / raw  # rows of the student are shorter
    if form.kind == "linear":
        merging = 4.0 * MAX_SPAN * square  # no gradient by the frozen embeddings
    else:
        layers = 6.0 * 4.0 * square * (form.depth - 1)
        merging = MAX_SPAN * (layers + 4.0 * square) + 6.0 * square
    return {
        "teacher": 2.0 * shape.block_weights * raw,
        "student": 4.0 * shape.block_weights * units,
        "attention": per_unit * raw + 3.0 * reduced * units,
        "loss": 6.0 * units * shape.head_weights,
        "module": spans * merging,
    }
